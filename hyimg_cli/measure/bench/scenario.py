"""Scenarios: a question, two variants, the phases that may differ, and a manifest.

A scenario is a TOML file with a manifest beside it; those of the package lie in `scenarios/`. A new
comparison is a new file, never a new harness.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue, nearest
from hyimg_cli.spec.events import PHASES

SCENARIOS = Path(__file__).parent / "scenarios"
Lifetime = Literal["session", "process", "process-per-job"]
# Phases of a run that no single job owns, before those of `spec.events.PHASES`.
START, LOAD, EMBED, PREWARM, REST = "start", "load", "embed", "prewarm", "unattributed"
EVERY_PHASE = "*"


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
    denoise steps to be timed; at `main_steps`, by default the last of them, pictures are compared.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    question: str
    a: Variant
    b: Variant
    phases: tuple[str, ...]
    manifest: Path
    common: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, ...] = (8,)
    main_steps: int = 0
    repeats: int = 5
    same_work: bool = False
    least_psnr: float | None = None

    @property
    def labels(self) -> tuple[str, str]:
        return self.a.label, self.b.label

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


def _scenario(path: Path, table: dict[str, Any]) -> Scenario:
    # Here, since it takes 0.2 s: the names alone are asked for by every --help.
    from pydantic import TypeAdapter, ValidationError

    for side in ("a", "b"):
        # In the file the settings of a side stand beside its label.
        if isinstance(of := table.get(side), dict):
            own = {name: of[name] for name in ("label", "lifetime") if name in of}
            table[side] = own | {"settings": {name: of[name] for name in of if name not in own}}
    try:
        found = TypeAdapter(Scenario).validate_python({**table, "name": path.stem})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise _fault(path, "; ".join(faults)) from None
    if not found.steps or min(found.steps) < 1:
        raise _fault(path, f"steps are {list(found.steps)}, not whole numbers from 1 on")
    for phase in found.phases:
        if phase not in (EVERY_PHASE, START, LOAD, EMBED, PREWARM, REST, *PHASES):
            raise _fault(path, f"{phase!r} is no phase")
    parts = {"common": found.common, "a": found.a.settings, "b": found.b.settings}
    for part, settings in parts.items():
        for name, value in settings.items():
            if name not in SETTINGS:
                close = nearest(name, SETTINGS)
                hint = f"did you mean {close}?" if close else "settings are those of a recipe"
                raise _fault(path, f"[{part}] {name} is no setting", hint)
            try:
                SETTINGS[name].kind.read(value)
            except BadValue as bad:
                raise _fault(path, f"[{part}] {name}: {bad.what}", bad.hint) from None
        if settings.get("replicas", 1) != 1:
            raise _fault(path, f"[{part}] replicas: a bench measures one session", "remove it")
    return replace(
        found, manifest=path.parent / found.manifest, main_steps=found.main_steps or found.steps[-1]
    )


def _fault(path: Path, what: str, hint: str = "see the scenarios of the package") -> UsageError:
    return UsageError(what, where=path.name, hint=hint, code="bench.scenario")
