"""The result of a check, and text made safe to pass on."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hyimg_cli.errors import HyimgError
from hyimg_cli.settings.run import RunConfig

# `failed`: the chosen models cannot run here. `warning`: they can, something else is missing.
Status = Literal["ok", "warning", "failed"]
# A path from the root, but not the rest of an address or of a relative path.
_PATH = re.compile(r"(?<![\w~….:/])/[^\s'\",;:()]+")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what to do where that is not enough.

    `name`: from the list of checks.
    """

    status: Status
    found: str
    hint: str = ""
    name: str = ""
    seconds: float = 0.0


Examine = Callable[[RunConfig], Check]


def run_checks(config: RunConfig, checks: Iterable[tuple[str, Examine]]) -> Iterator[Check]:
    """Each check's answer as it comes. One that raises has failed; the others are made all the
    same.
    """
    for name, examine in checks:
        began = time.perf_counter()
        try:
            check = examine(config)
        except HyimgError as error:
            check = Check("failed", error.what, error.hint)
        # NOTE: a package that is half installed ends in nearly any error: that is looked for.
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            check = Check("failed", what, "reinstall hyimg; if that does not help, report it")
        yield replace(
            check,
            name=name,
            found=portable_text(check.found),
            hint=portable_text(check.hint),
            seconds=time.perf_counter() - began,
        )


def is_ready(checks: Iterable[Check]) -> bool:
    """True if nothing that is needed is missing."""
    return all(check.status != "failed" for check in checks)


def portable_text(text: str) -> str:
    """`text` with every path from the root as `portable_path` writes it."""
    return _PATH.sub(lambda match: portable_path(Path(match[0])), text)


def portable_path(path: Path) -> str:
    """A path that tells nothing of the user: from their home, or only its last name."""
    if not path.is_absolute():
        return str(path)
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or a user without a home
        return f"…/{path.name}"
