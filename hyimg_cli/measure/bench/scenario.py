"""Read scenarios: a question, two or more variants, phases that may differ, and a manifest.

A scenario is a TOML file with a manifest next to it; the package's own are in `scenarios/`.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import BadValue, nearest
from hyimg_cli.spec.events import PHASES

SCENARIOS = Path(__file__).parent / "scenarios"
Lifetime = Literal["session", "process", "process-per-job"]
# Phases of a run that belong to no single job, in addition to `spec.events.PHASES`.
START, LOAD, EMBED, PREWARM, REST = "start", "load", "embed", "prewarm", "unattributed"
EVERY_PHASE = "*"
# The tables of a file that hold its variants, in order.
SIDES = "abcd"


@dataclass(frozen=True)
class Variant:
    """One way to run the jobs: its settings, and how long its loaded state lives.

    `session`: one session for all runs, emptied before each. `process`: each run has its own
    process. `process-per-job`: each job of each run has one. Without `keeps_kv`, every denoise step
    computes its whole sequence again, for measurement only. `phases`: where the variants before
    this one may be faster than it, if not in the scenario's phases.
    """

    label: str
    settings: Mapping[str, Any]
    lifetime: Lifetime = "session"
    keeps_kv: bool = True
    phases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """A comparison of `variants`, the most optimised one first and the plainest one last.

    `phases`: where a variant may be faster than a later one (`*`: anywhere); a gain elsewhere is
    not explained. `same_work`: the variants do the same work, at other times or in another
    precision, and their lines say so. `least_psnr`: the first of two variants is declared to change
    pictures, down to this PSNR in dB. `steps`: the denoise steps to time. Pictures are compared at
    `main_steps`, by default the last of them. `uneven_steps`: every other job takes one step less,
    so jobs of one batch are at different steps.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    question: str
    variants: tuple[Variant, ...]
    phases: tuple[str, ...]
    manifest: Path
    common: Mapping[str, Any] = field(default_factory=dict)
    steps: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] = (8,)
    main_steps: Annotated[int, Ge(0)] = 0
    repeats: Annotated[int, Ge(1)] = 5
    same_work: bool = False
    least_psnr: float | None = None
    uneven_steps: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(variant.label for variant in self.variants)

    @property
    def title(self) -> str:
        return " vs ".join(self.labels)

    @property
    def pairs(self) -> "list[Scenario]":
        """Return each pair of variants as a comparison, in order."""
        return [
            replace(self, variants=(one, other), phases=other.phases or self.phases)
            for one, other in combinations(self.variants, 2)
        ]

    def may_gain_in(self, phase: str) -> bool:
        return EVERY_PHASE in self.phases or phase in self.phases


def names() -> list[str]:
    """Return the names of the packaged comparisons."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def read_scenario(name: str) -> Scenario:
    """Return the packaged scenario of this name, or the scenario in a TOML file.

    Raises UsageError for an unknown name or field.
    """
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not os.path.exists(path):
        close = nearest(name, names())
        hint = f"did you mean {close}?" if close else f"choose one of {', '.join(names())}"
        raise UsageError(f"unknown comparison {name!r}", hint=hint, code="bench.unknown")
    try:
        return _scenario(path, tomllib.loads(text_of(path, SETTINGS_BYTES)))
    except OSError as error:
        raise _fault(path, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"not valid TOML: {error}") from None


def _scenario(path: Path, table: dict[str, Any]) -> Scenario:
    # Imported here, since it takes 0.2 s: --help needs the names only.
    from pydantic import TypeAdapter, ValidationError

    sides = [*takewhile(table.__contains__, SIDES)]
    if len(sides) < 2:
        raise _fault(path, "it needs two variants", "add tables [a] and [b], and [c] for a third")
    variants = []
    for side in sides:
        if isinstance(of := table.pop(side), dict):
            # In the file, a variant's settings are in one table with its label.
            own = {one.name: of[one.name] for one in fields(Variant) if one.name in of}
            of = own | {"settings": {name: of[name] for name in of if name not in own}}
        variants.append(of)
    try:
        table |= {"name": path.stem, "variants": variants}
        found = TypeAdapter(Scenario).validate_python(table)
    except ValidationError as error:
        what = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        for number, side in enumerate(sides):
            what = what.replace(f"variants.{number}", side)
        raise _fault(path, what) from None
    _check_settings(path, "common", found.common)
    for side, one in zip(sides, found.variants, strict=True):
        _check_settings(path, side, one.settings)
        of = {**found.common, **one.settings}
        if not one.keeps_kv and (of.get("kv_reuse", True) or of.get("cfg_parallel_size", 1) != 1):
            hint = "add kv_reuse = false and remove cfg_parallel_size"
            raise _fault(path, f"[{side}] keeps_kv = false needs kv_reuse = false", hint)
    if len(set(found.labels)) < len(sides):
        raise _fault(path, "two variants have the same label")
    if found.least_psnr is not None and len(sides) > 2:
        raise _fault(path, "least_psnr needs exactly two variants", "remove [c]")
    phases = {*found.phases, *(phase for one in found.variants for phase in one.phases)}
    if unknown := phases - {EVERY_PHASE, START, LOAD, EMBED, PREWARM, REST, *PHASES}:
        raise _fault(path, f"unknown phase {min(unknown)!r}")
    return replace(
        found, manifest=path.parent / found.manifest, main_steps=found.main_steps or found.steps[-1]
    )


def _check_settings(path: Path, part: str, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name not in SETTINGS:
            close = nearest(name, SETTINGS)
            hint = f"did you mean {close}?" if close else "use the settings of a recipe"
            raise _fault(path, f"[{part}] {name} is not a setting", hint)
        try:
            SETTINGS[name].kind.read(value)
        except BadValue as bad:
            raise _fault(path, f"[{part}] {name}: {bad.what}", bad.hint) from None
    if settings.get("replicas", 1) != 1:
        raise _fault(path, f"[{part}] replicas: a bench measures one session", "remove it")


def _fault(path: Path, what: str, hint: str = "see docs/measuring.md") -> UsageError:
    return UsageError(what, where=path.name, hint=hint, code="bench.scenario")
