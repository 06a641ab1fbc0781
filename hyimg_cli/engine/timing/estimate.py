"""Seconds that a plan will take, by what runs like it have taken.

Each phase costs so much a call (a forward, a job) and so much a unit (a row, a token, a pixel):
a line through what was kept. The spread is what runs differed in, what a phase may cost where no
run had as many units a call, and what other programs on the machine may take.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hyimg_cli.engine.choice import replicas_of
from hyimg_cli.engine.timing.machine import slowdown, threads
from hyimg_cli.engine.timing.observed import RunTiming, Sample
from hyimg_cli.engine.timing.planned import GroupWork, works
from hyimg_cli.journal.keys import precision
from hyimg_cli.journal.provenance import cores
from hyimg_cli.manifest.cost import PlanCost
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig

# What a run's seconds mean: the last so many count.
_NEWEST = 20
# Slowed down by less, a run counts as undisturbed.
_QUIET = 1.1
# A forecast from few runs may be off by this much, however alike they were.
_LEAST_SPREAD = {1: 0.25, 2: 0.2}
_LEAST = 0.15
# What others want now, they may want twice of while it runs, or nothing.
_MORE = 2.0
_PULL = 0.01


@dataclass(frozen=True)
class Seconds:
    """A figure between two bounds."""

    middle: float
    low: float
    high: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.middle + other.middle, self.low + other.low, self.high + other.high)

    def times(self, middle: float, low: float, high: float) -> "Seconds":
        return Seconds(self.middle * middle, self.low * low, self.high * high)


_NONE = Seconds(0, 0, 0)


@dataclass(frozen=True)
class Estimate:
    """How long a plan will take: all of it, and `parts` of it by phase; from so many runs and
    trials.

    `unknown`: models that neither tells of; then nothing else is known. `others`: cores that other
    programs have now, and `slowdown` what they make of it.
    """

    all: Seconds
    parts: Mapping[str, Seconds]
    runs: int = 0
    trials: int = 0
    unknown: tuple[str, ...] = ()
    others: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True)
class Machine:
    """What counts for time where a plan will run: threads a process, cores, those that other
    programs have.
    """

    threads: int
    cores: int
    others: float
    is_cpu: bool
    replicas: int = 1

    @property
    def slowdown(self) -> float:
        """By what others compute now; on a GPU the processors count for nothing."""
        return self.slowed_by(1.0)

    def slowed_by(self, times: float) -> float:
        """The same if others had so many times as much to compute."""
        crowd = self.threads * self.replicas
        return slowdown(times * self.others, crowd, self.cores) if self.is_cpu else 1.0


def estimate(
    of_plan: Sequence[GroupWork], kept: Mapping[str, Sequence[RunTiming]], machine: Machine
) -> Estimate:
    """The seconds of a plan's groups. `kept`: by model, timings under its conditions."""
    models = list(dict.fromkeys(work.model for work in of_plan))
    unknown = tuple(model for model in models if not _has_drawn(kept.get(model, ())))
    if unknown:
        return Estimate(_NONE, {}, unknown=unknown)
    parts: dict[str, Seconds] = {}
    sources: list[tuple[int, int]] = []
    spread = 1.0, 1.0
    for number, model in enumerate(models):
        chosen = _chosen(kept[model], machine)
        mine = [work for work in of_plan if work.model == model]
        found = _of_model(mine, chosen, machine.replicas)
        if number == 0:
            jobs = sum(work.jobs for work in of_plan)
            found["start"] = _of_run("start", 1, 0, chosen)
            found["end"] = _of_run("end", 1, jobs, chosen)
        for name, seconds in found.items():
            parts[name] = parts.get(name, _NONE) + seconds
        low, high = _scatter(chosen)
        spread = min(spread[0], low), max(spread[1], high)
        trials = sum(run.is_trial for run in chosen)
        sources.append((len(chosen) - trials, trials))
    busy = machine.slowdown
    most = spread[1] * machine.slowed_by(_MORE)
    parts = {name: one.times(busy, spread[0], most) for name, one in parts.items()}
    runs, trials = min(sources, key=sum, default=(0, 0))
    return Estimate(_summed(parts.values()), parts, runs, trials, (), machine.others, busy)


def plan_time(
    plan: Plan,
    costs: PlanCost,
    config: RunConfig,
    kept: Mapping[str, Sequence[RunTiming]],
    others: float,
) -> Estimate:
    """How long `plan` takes here, `others` being the cores that other programs have."""
    machine = _machine(config, replicas_of(plan, config), others)
    groups = {
        model: [group for run in runs for group in run.groups] for model, runs in kept.items()
    }
    return estimate(works(plan, costs, config, groups), kept, machine)


def undisturbed(
    kept: Mapping[str, Sequence[RunTiming]], config: RunConfig, replicas: int
) -> dict[str, list[RunTiming]]:
    """The runs of each model that a run of so many replicas is measured by."""
    machine = _machine(config, replicas, others=0.0)
    return {model: _chosen(runs, machine) for model, runs in kept.items()}


def _machine(config: RunConfig, replicas: int, others: float) -> Machine:
    is_cpu = precision(config.model)[0] == "cpu"
    return Machine(threads(replicas), cores(), others, is_cpu, replicas)


def _of_model(
    of_model: Sequence[GroupWork], runs: Sequence[RunTiming], replicas: int
) -> dict[str, Seconds]:
    """Loading and prewarming once, and the phases of all groups; replicas share these."""
    shapes = sum(work.shapes for work in of_model)
    strings = len(frozenset().union(*(work.strings for work in of_model)))
    found = {
        "load": _of_run("load", 1, 1, runs),
        "prewarm": _of_run("prewarm", shapes, 0, runs),
        "embed": _of_run("embed", min(1, strings), strings, runs),
    }
    for work in of_model:
        share = 1 / min(replicas, work.jobs) if work.jobs else 1.0
        samples, are_alike = _of_groups(work.size_class, runs)
        for name, (calls, units) in work.phases.items():
            seconds = predicted(calls, units, samples.get(name, ()), are_alike=are_alike)
            found[name] = found.get(name, _NONE) + seconds.times(share, share, share)
    return found


def _of_run(name: str, calls: float, units: float, runs: Sequence[RunTiming]) -> Seconds:
    return predicted(calls, units, [run.phases[name] for run in runs if name in run.phases])


def _of_groups(size_class: str, runs: Sequence[RunTiming]) -> tuple[dict[str, list[Sample]], bool]:
    """Samples by phase: of groups of this size, or of all where there are none (False)."""
    groups = [group for run in runs for group in run.groups]
    alike = [group for group in groups if group.size_class == size_class]
    some = alike or groups
    names = {name for group in some for name in group.phases}
    found = {name: [g.phases[name] for g in some if name in g.phases] for name in names}
    return found, bool(alike)


def predicted(
    calls: float, units: float, samples: Sequence[Sample], *, are_alike: bool = True
) -> Seconds:
    """Seconds of so many calls and units, by a line through samples.

    The bounds are those of the sample with the most similar work: all of it by calls, all of it by
    units. Where that had as many units a call both are the same. Samples that are not alike, of
    other sizes, each have a say.
    """
    some = [one for one in samples if one.calls > 0]
    if not some or calls <= 0:
        return _NONE
    by_call, by_unit = line(some)
    middle = by_call * calls + by_unit * units
    nearest = min(some, key=lambda one: _apart(one.units / one.calls, units / calls))
    ends = [middle]
    for one in [nearest] if are_alike else some:
        ends.append(one.seconds * calls / one.calls)
        if one.units > 0 and units > 0:
            ends.append(one.seconds * units / one.units)
    return Seconds(middle, min(ends), max(ends))


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(a, b, 1e-9)


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds a call and a unit, neither below 0, that fit samples best by relative error.

    Samples alike in units a call cannot tell the two apart: then each has half.
    """
    calls = statistics.median(one.seconds / one.calls for one in samples)
    with_units = [one.seconds / one.units for one in samples if one.units > 0]
    if not with_units:
        return calls, 0.0
    units = statistics.median(with_units)
    seconds = [one.seconds for one in samples if one.seconds > 0]
    if not seconds or not calls or not units:
        return calls, 0.0
    # In parts of the two medians; a weak pull holds what the samples leave open at half and half.
    rows = [
        (one.calls * calls / one.seconds, one.units * units / one.seconds)
        for one in samples
        if one.seconds > 0
    ]
    pull = _PULL * len(rows)
    aa = sum(a * a for a, _ in rows) + pull
    bb = sum(b * b for _, b in rows) + pull
    ab = sum(a * b for a, b in rows)
    ya = sum(a for a, _ in rows) + pull / 2
    yb = sum(b for _, b in rows) + pull / 2
    a, b = (ya * bb - yb * ab) / (aa * bb - ab * ab), (yb * aa - ya * ab) / (aa * bb - ab * ab)
    if a < 0:
        a, b = 0.0, sum(b for _, b in rows) / sum(b * b for _, b in rows)
    elif b < 0:
        a, b = sum(a for a, _ in rows) / sum(a * a for a, _ in rows), 0.0
    return a * calls, b * units


def _chosen(kept: Sequence[RunTiming], machine: Machine) -> list[RunTiming]:
    """The runs to go by, as if undisturbed: with as many threads where there are such; on a quiet
    machine those that were undisturbed where there are such.
    """
    alike = [run for run in kept if run.threads == machine.threads] or list(kept)
    alike = [run for run in alike if run.groups][-_NEWEST:]

    def slowed(run: RunTiming) -> float:
        return slowdown(run.others, run.threads, machine.cores) if machine.is_cpu else 1.0

    # Where others compute now, what they made of earlier runs counts for the spread.
    is_quiet = machine.slowdown < _QUIET
    quiet = [run for run in alike if is_quiet and slowed(run) < _QUIET] or alike
    return [_scaled(run, 1 / slowed(run)) for run in quiet]


def _scaled(run: RunTiming, factor: float) -> RunTiming:
    def of(phases: Mapping[str, Sample]) -> dict[str, Sample]:
        return {name: replace(one, seconds=one.seconds * factor) for name, one in phases.items()}

    groups = tuple(replace(group, phases=of(group.phases)) for group in run.groups)
    return replace(run, phases=of(run.phases), groups=groups)


def _has_drawn(runs: Iterable[RunTiming]) -> bool:
    return any(group.phases.get("denoise") for run in runs for group in run.groups)


def _scatter(runs: Sequence[RunTiming]) -> tuple[float, float]:
    """The least and the most that a run took of what the line through all of them says."""
    least = _LEAST_SPREAD.get(len(runs), _LEAST)
    ratios = [1 - least, 1 + least]
    for run in runs:
        samples = {g.size_class: _of_groups(g.size_class, runs)[0] for g in run.groups}
        said = [
            predicted(one.calls, one.units, samples[g.size_class][name]).middle
            for g in run.groups
            for name, one in g.phases.items()
        ]
        took = [one.seconds for g in run.groups for one in g.phases.values()]
        if sum(said) > 0:
            ratios.append(sum(took) / sum(said))
    return min(ratios), max(ratios)


def _summed(seconds: Iterable[Seconds]) -> Seconds:
    return sum(seconds, _NONE)
