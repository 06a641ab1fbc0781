"""Scenarios: a question, two variants, the phases that may differ, and a manifest.

A scenario is a TOML file with a manifest beside it; those of the package lie in `scenarios/`. A new
comparison is a new file, never a new harness.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.settings.kinds import BadValue, nearest
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.events import PHASES

SCENARIOS = Path(__file__).parent / "scenarios"
Lifetime = Literal["session", "process", "process-per-job"]
# Phases of a run that no single job owns, before those of `spec.events.PHASES`.
START, LOAD, EMBED, PREWARM, REST = "start", "load", "embed", "prewarm", "unattributed"
EVERY_PHASE = "*"
_OPTIONAL = ("common", "steps", "main_steps", "repeats", "same_work", "least_psnr")


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: its settings, and how long what it has loaded lives.

    `session`: one session for all runs, emptied before each. `process`: each run is a process of
    its own. `process-per-job`: each job of each run is.
    """

    label: str
    settings: Mapping[str, Any]
    lifetime: Lifetime = "session"


@dataclass(frozen=True)
class Scenario:
    """A comparison. `a` is the optimised variant, `b` the plain one.

    `phases` are those in which `a` may gain (`*`: any); a gain elsewhere is not explained.
    `same_work`: the variants do the same, at other times or in another precision, and their lines
    say so. `least_psnr`: `a` is declared to change pictures, at most so far, in dB. `steps` are the
    denoise steps to be timed; at `main_steps` pictures are compared.
    """

    name: str
    question: str
    a: Variant
    b: Variant
    common: Mapping[str, Any]
    phases: tuple[str, ...]
    steps: tuple[int, ...]
    main_steps: int
    repeats: int
    manifest: Path
    same_work: bool = False
    least_psnr: float | None = None

    def may_gain_in(self, phase: str) -> bool:
        return EVERY_PHASE in self.phases or phase in self.phases


def names() -> list[str]:
    """The comparisons that the package has."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def read_scenario(name: str) -> Scenario:
    """The packaged scenario of a name, or that of a TOML file.

    Raises UsageError for a name or a field that is not known.
    """
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not os.path.exists(path):
        close = nearest(name, names())
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(names())}"
        raise UsageError(f"there is no comparison {name!r}", hint=hint, code="bench.unknown")
    try:
        return _scenario(path, tomllib.loads(text_of(path, SETTINGS_BYTES)))
    except OSError as error:
        raise _fault(path, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"not valid TOML: {error}") from None
    except (TypeError, AttributeError, LookupError) as error:
        raise _fault(path, f"a value is of the wrong kind: {error}") from None


def _scenario(path: Path, table: dict[str, Any]) -> Scenario:
    required = ("question", "a", "b", "phases", "manifest")
    missing = [name for name in required if name not in table]
    unknown = sorted(set(table) - {*required, *_OPTIONAL})
    if missing or unknown:
        what = f"missing: {', '.join(missing)}" if missing else f"not known: {', '.join(unknown)}"
        raise _fault(path, what)
    steps = tuple(table.get("steps", (8,)))
    phases = tuple(table["phases"])
    if not steps or not all(isinstance(one, int) and one > 0 for one in steps):
        raise _fault(path, f"steps are {list(steps)}, not whole numbers from 1 on")
    for phase in phases:
        if phase not in (EVERY_PHASE, START, LOAD, EMBED, PREWARM, REST, *PHASES):
            raise _fault(path, f"{phase!r} is no phase")
    return Scenario(
        name=path.stem,
        question=table["question"],
        a=_variant(path, "a", table["a"]),
        b=_variant(path, "b", table["b"]),
        common=_settings(path, "common", table.get("common", {})),
        phases=phases,
        steps=steps,
        main_steps=table.get("main_steps", steps[-1]),
        repeats=table.get("repeats", 5),
        manifest=path.parent / table["manifest"],
        same_work=bool(table.get("same_work", False)),
        least_psnr=float(table["least_psnr"]) if "least_psnr" in table else None,
    )


def _variant(path: Path, side: str, table: dict[str, Any]) -> Variant:
    if not isinstance(table, dict):
        raise _fault(path, f"[{side}] is no table")
    settings = dict(table)
    if "label" not in settings:
        raise _fault(path, f"[{side}] has no label")
    label, lifetime = settings.pop("label"), settings.pop("lifetime", "session")
    if lifetime not in get_args(Lifetime):
        raise _fault(
            path, f"[{side}] lifetime is {lifetime!r}, not {', '.join(get_args(Lifetime))}"
        )
    return Variant(label, _settings(path, side, settings), lifetime)


def _settings(path: Path, table: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in settings.items():
        if name not in SETTINGS:
            close = nearest(name, SETTINGS)
            hint = f"did you mean {close}?" if close else "settings are those of a recipe"
            raise _fault(path, f"[{table}] {name} is no setting", hint)
        try:
            SETTINGS[name].kind.read(value)
        except BadValue as bad:
            raise _fault(path, f"[{table}] {name}: {bad.what}", bad.hint) from None
    if settings.get("replicas", 1) != 1:
        raise _fault(path, f"[{table}] replicas: a bench measures one session", "take it out")
    return settings


def _fault(path: Path, what: str, hint: str = "see the scenarios of the package") -> UsageError:
    return UsageError(what, where=path.name, hint=hint, code="bench.scenario")
