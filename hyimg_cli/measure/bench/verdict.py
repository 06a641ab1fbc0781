"""Judge the findings of a comparison: one of six words, with reasons.

    identical · equal · within floor · as declared    good, exit code 0
    differs · not explained                           exit code 1

Pictures decide first, then the clock: a gain outside the variant's own phases has another cause,
even if the pictures are equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from hyimg_cli.measure.bench.budget import DistanceRow
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import Scenario
from hyimg_cli.spec.job import Job

# From good to bad; the last two are exit code 1.
VerdictName = Literal[
    "identical", "equal", "within floor", "as declared", "not explained", "differs"
]
VERDICTS = get_args(VerdictName)
# Thresholds of a noticeable difference in time: see `_time_faults`.
_SHARE_OF_WALL, _LEAST_SHARE, _SHARE_OF_GAIN, _SECONDS = 0.05, 0.01, 0.25, 0.02
_SHARE_OF_IDLE = 0.25
# Fewer runs prove nothing about time.
FEWEST_RUNS = 3
_MOST_REASONS = 12
# How often an interval holds the true median, if there are enough runs.
_COVERAGE = 0.9
Sides = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reasons as sentences."""

    name: VerdictName
    reasons: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.name in VERDICTS[-2:] else 0


@dataclass(frozen=True)
class Timed:
    """The repetitions of one step count, in the order in which they ran: A B A B."""

    steps: int
    a: tuple[RunResult, ...]
    b: tuple[RunResult, ...]

    def values(self, of: Callable[[RunResult], float]) -> Sides:
        """Return a value of each run of A, and of B."""
        return [*map(of, self.a)], [*map(of, self.b)]

    @property
    def walls_s(self) -> Sides:
        return self.values(lambda run: run.wall_s)

    @property
    def gain_s(self) -> float:
        """Return the seconds per run by which A is faster than B, from their medians."""
        return _apart(*self.walls_s)

    def gain_in_s(self, phase: str) -> float:
        """Return the same for one phase."""
        return _apart(*self.values(lambda run: run.phases_s[phase]))

    @property
    def speedup(self) -> dict[str, float]:
        """Speed-up of A over B, each run compared with its neighbour in time: `median_interval`."""
        return median_interval([b / a for a, b in zip(*self.walls_s, strict=True)])

    @property
    def speedup_of_medians(self) -> float:
        """Speed-up of A over B by the medians of all runs."""
        a, b = map(median, self.walls_s)
        return b / a

    @property
    def variations(self) -> list[float]:
        """How many times longer than the fastest the slowest run took, for A and for B."""
        return [max(walls_s) / min(walls_s) for walls_s in self.walls_s]

    @property
    def is_resolved(self) -> bool:
        """False if one variant's runs differ as much as the variants, without steady winner."""
        up, most = self.speedup_of_medians, max(self.variations)
        return most < max(up, 1 / up, 1 + _SHARE_OF_WALL) or is_steady(*self.walls_s, 0.0)


@dataclass(frozen=True)
class Comparison:
    """The findings on the two variants of a scenario's pair.

    `pairs`: by step count, A against B. `floors`: A against A, then B against B. `other_seed`: the
    scenario's first variant against itself with another seed. `same_work`: jobs for which both
    variants did exactly the same work although they should not. `rivals`: if A declares a loss, by
    step count, B against itself in as many steps as A evaluates.
    """

    scenario: Scenario
    pairs: Mapping[int, DistanceRow]
    floors: tuple[DistanceRow, DistanceRow]
    other_seed: DistanceRow
    timed: Sequence[Timed]
    failures: Sequence[str] = ()
    same_work: Sequence[str] = ()
    rivals: Mapping[int, DistanceRow] = field(default_factory=dict)

    @property
    def worst(self) -> DistanceRow:
        """The row of the step count at which A and B differ most."""
        return min(self.pairs.values(), key=lambda row: row.psnr)

    @property
    def verdict(self) -> Verdict:
        """The verdict on all findings."""
        faults = list(self.failures)
        # A seed that has no effect, and variants that do not differ.
        if self.other_seed.unchanged:
            faults.append(f"another seed does not change {', '.join(self.other_seed.unchanged)}")
        if self.same_work:
            jobs = ", ".join(self.same_work)
            faults.append(f"both variants did the same work for {jobs}: nothing was compared")
        faults += (reason for timed in self.timed for reason in _time_faults(timed, self.scenario))
        unresolved = []
        for timed in self.timed:
            if not timed.is_resolved:
                most, label = max(zip(timed.variations, self.scenario.labels, strict=True))
                steps = f"at {timed.steps} steps"
                unresolved.append(f"time: not resolved, runs of {label} vary {most:.2g}x {steps}")
        name = _by_pictures(self)
        if name == "differs" or self.failures:
            return Verdict("differs", _said_once([*_differences(self), *faults, *unresolved]))
        if faults:
            return Verdict("not explained", _said_once([*faults, *unresolved]))
        return Verdict(name, (_in_words(name, self), *unresolved))


@dataclass(frozen=True)
class Findings:
    """The result of a bench: each pair of its variants, compared on these jobs.

    `kept`: the folder with the pictures.
    """

    scenario: Scenario
    comparisons: Sequence[Comparison]
    jobs: Sequence[Job]
    notes: Sequence[str]
    kept: Path

    @property
    def rows(self) -> tuple[DistanceRow, ...]:
        """The precision budget from top to bottom."""
        first = self.comparisons[0]
        every = [row for one in self.comparisons for row in (*one.floors, *one.pairs.values())]
        every += [*first.rivals.values(), first.other_seed]
        # Floors first; each is in several pairs.
        every.sort(key=lambda row: not row.name.endswith(" twice"))
        return tuple({row.name: row for row in every}.values())

    @property
    def worst(self) -> Comparison:
        """The first comparison with the worst verdict."""
        return max(self.comparisons, key=lambda one: VERDICTS.index(one.verdict.name))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; each reason names its pair if there are several."""
        worst = self.worst
        if len(self.comparisons) == 1:
            return worst.verdict
        ordered = sorted(self.comparisons, key=lambda one: one is not worst)
        found = ((one.scenario.title, reason) for one in ordered for reason in one.verdict.reasons)
        return Verdict(worst.verdict.name, _said_once([": ".join(one) for one in found]))


def _time_faults(timed: Timed, scenario: Scenario) -> Iterator[str]:
    """Yield sentences on differences in time that the variants' difference does not explain.

    Medians are compared: a steady difference counts, a disturbed run does not.
    """
    if len(timed.a) < FEWEST_RUNS:
        return
    # A noticeable number of seconds: a part of the gain, or of the run if the gain is small.
    wall_s = median(timed.walls_s[1])
    of_gain_s = max(_SHARE_OF_GAIN * abs(timed.gain_s), _LEAST_SHARE * wall_s)
    least_s = max(_SECONDS, min(_SHARE_OF_WALL * wall_s, of_gain_s))
    shared = [phase for phase in RUN_PHASES if not scenario.may_gain_in(phase)]
    work_s = timed.values(lambda run: sum(run.phases_s[phase] for phase in shared))
    # Per process: each reads its weights, and waits for the disk. If other programs use the
    # processor, both variants wait, by varying amounts.
    idle_s = timed.values(lambda run: run.idle_s / run.processes)
    disturbed_s = _SHARE_OF_IDLE * min(map(median, idle_s))
    slower = (
        "is {:.2f} s a run slower in {}, where both variants do the same work; the whole gain is "
        "{:.2f} s"
    )
    waits = (
        "waits {:.2f} s longer without any work, most likely in {}: a sleep or a timeout, no "
        "computation"
    )
    for sides, least, phases, says in (
        (work_s, least_s, shared, slower),
        (idle_s, max(least_s, disturbed_s), RUN_PHASES, waits),
    ):
        if is_steady(*sides, least):
            apart_s = _apart(*sides)
            label, sign = (scenario.labels[1], 1) if apart_s > 0 else (scenario.labels[0], -1)
            where = max(phases, key=lambda phase: sign * timed.gain_in_s(phase))
            yield f"{timed.steps} steps: {label} {says.format(abs(apart_s), where, timed.gain_s)}"


def clock_notes(timed: Timed) -> Iterator[str]:
    """Yield sentences on speed-ups shown together that do not agree."""
    paired, overall = timed.speedup["median"], timed.speedup_of_medians
    if timed.is_resolved and abs(overall / paired - 1) > _LEAST_SHARE:
        yield (
            f"{timed.steps} steps: the speed-up of {paired:.3f} is the median of ratios, each of "
            f"two runs side by side; the medians of all runs give {overall:.3f}, because the "
            "machine's speed varied"
        )


def _by_pictures(found: Comparison) -> VerdictName:
    if all(row.is_identical for row in found.pairs.values()):
        return "identical"
    if all(row.is_equal for row in found.pairs.values()):
        return "equal"
    if found.scenario.least_psnr is not None:
        return "differs" if any(_loss_faults(found)) else "as declared"
    # The plain variant's floor: a floor that A has because it draws at random excuses nothing. No
    # floor excuses a distance as large as another seed's.
    worst, least = found.worst.psnr, found.floors[1].psnr
    return "within floor" if worst >= least and worst > found.other_seed.psnr else "differs"


def _differences(found: Comparison) -> Iterator[str]:
    """Yield the distance of the pictures, and variants that do not repeat themselves."""
    yield from _loss_faults(found)
    worst, floor, seed = found.worst, found.floors[1].psnr, found.other_seed
    if worst.missing:
        yield f"{worst.name}: no pair of pictures of one size for {', '.join(worst.missing)}"
    elif not worst.is_equal:
        below = "where the plain variant repeats itself exactly"
        if floor != inf:
            side = "below" if worst.psnr < floor else "above"
            below = f"{abs(floor - worst.psnr):.1f} dB {side} the floor of {floor:.1f} dB"
        if worst.psnr <= seed.psnr:
            below += f"; another seed gives {seed.psnr:.1f} dB, which is no further apart"
        yield f"the pictures are {worst.psnr:.1f} dB apart, {below}"
    for label, own in zip(found.scenario.labels, found.floors, strict=True):
        if not own.is_identical:
            yield f"{label} does not repeat itself: {own.psnr:.1f} dB from run to run"


def _loss_faults(found: Comparison) -> Iterator[str]:
    """Yield sentences on a declared loss that is larger than declared, or useless."""
    least, seed = found.scenario.least_psnr, found.other_seed
    if least is None:
        return
    for steps, row in found.pairs.items():
        if row.psnr < least:
            yield f"{steps} steps: {row.psnr:.1f} dB, below the declared {least:g} dB"
        if row.psnr <= seed.psnr:
            yield f"{steps} steps: {row.psnr:.1f} dB, no closer than another seed"
        rival = found.rivals.get(steps)
        if rival is not None and row.psnr <= rival.psnr:
            yield f"{steps} steps: {row.psnr:.1f} dB, and {rival.psnr:.1f} dB for {rival.name}"


def _in_words(name: VerdictName, found: Comparison) -> str:
    rows = found.pairs.values()
    if name == "identical":
        count = sum(len(row.distances) for row in rows)
        return f"every value of {count} pairs of pictures is the same"
    if name == "equal":
        most = max(max(row.values("max_abs")) for row in rows)
        share = 1 - min(min(row.values("equal_share")) for row in rows)
        return f"at most {share:.2%} of a picture's values are off, by {most} level"
    if name == "as declared":
        others = [*found.rivals.values()] or [found.other_seed]
        rivals = ", ".join(f"{row.psnr:.1f} dB for {row.name}" for row in others)
        return f"{found.worst.psnr:.1f} dB or more, where {rivals}: a lossy variant"
    floor = found.floors[1].psnr
    return f"{found.worst.psnr:.1f} dB, where a variant reaches {floor:.1f} dB against itself"


def _said_once(reasons: Sequence[str]) -> tuple[str, ...]:
    once = tuple(dict.fromkeys(reasons))
    more = len(once) - _MOST_REASONS
    return once if more <= 0 else (*once[:_MOST_REASONS], f"and {more} more")


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the `median` with `low` and `high`, an interval that covers the true one.

    It is the narrowest symmetric pair of order statistics that covers the true median often enough.
    Exact for any continuous distribution: the number of values below the true median is binomial.
    With few values it is their whole range; see its `coverage`.
    """
    ordered, n = sorted(values), len(values)
    for cut in range((n - 1) // 2, -1, -1):
        covered = 1 - 2 * sum(comb(n, k) for k in range(cut + 1)) / 2**n
        if covered >= _COVERAGE:
            break
    ends = {"low": ordered[cut], "high": ordered[n - 1 - cut]}
    return {"median": median(ordered), **ends, "coverage": max(covered, 0.0)}


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return the number, median and extremes of repetitions."""
    middle = median(values)
    return {"n": len(values), "median": middle, "min": min(values), "max": max(values)}


def is_steady(a: Sequence[float], b: Sequence[float], least: float) -> bool:
    """Return whether two sides differ by more than `least` and more than they scatter.

    The medians must be apart by three median deviations of either side, and four of five pairs,
    each measured side by side, by more than `least` in the same direction.
    """
    apart = _apart(a, b)
    scatter = max(median(abs(one - median(side)) for one in side) for side in (a, b))
    if abs(apart) <= max(least, 3 * scatter):
        return False
    sign = 1 if apart > 0 else -1
    agreeing = sum(sign * (two - one) > least for one, two in zip(a, b, strict=True))
    return agreeing >= 0.8 * len(a)


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return median(b) - median(a)
