"""The result of a check, and text that is safe to share."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hyimg_cli.errors import HyimgError
from hyimg_cli.settings.run import RunConfig

# `failed`: the chosen models cannot run here. `warning`: they can, but something is missing.
Status = Literal["ok", "warning", "failed"]
# An absolute path, but not part of an address or of a relative path.
_PATH = re.compile(r"(?<![\w~….:/])/[^\s'\",;:()]+")


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found, and a hint on how to fix a problem.

    `name`: the name in the list of checks.
    """

    status: Status
    found: str
    hint: str = ""
    name: str = ""
    seconds: float = 0.0


Examine = Callable[[RunConfig], Check]


def run_checks(config: RunConfig, checks: Iterable[tuple[str, Examine]]) -> Iterator[Check]:
    """Yield each check's result when it is ready.

    A check that raises an error has failed; the other checks still run.
    """
    for name, examine in checks:
        began = time.perf_counter()
        try:
            check = examine(config)
        except HyimgError as error:
            check = Check("failed", error.what, error.hint)
        # NOTE: a partly installed package can raise almost any error, so catch all of them.
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
    """Return True if no check failed."""
    return all(check.status != "failed" for check in checks)


def portable_text(text: str) -> str:
    """Return `text` with every absolute path written by `portable_path`."""
    return _PATH.sub(lambda match: portable_path(Path(match[0])), text)


def portable_path(path: Path) -> str:
    """Return a path that does not reveal the user: relative to their home, or its last name."""
    if not path.is_absolute():
        return str(path)
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # not in the home, or a user without one
        return f"…/{path.name}"
