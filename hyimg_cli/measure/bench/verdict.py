"""What a comparison comes to, in one of five words, and why.

    identical · equal · within floor    exit code 0
    differs · not explained             exit code 1

Pictures decide first, then the clock: a gain that the variant's own phases do not show has another
cause, and pictures that are the same do not excuse it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from hyimg_cli.measure.bench.budget import Row
from hyimg_cli.measure.bench.divergence import Divergence
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import Scenario
from hyimg_cli.measure.bench.stats import is_steady

VerdictName = Literal["identical", "equal", "within floor", "differs", "not explained"]
_GOOD = ("identical", "equal", "within floor")
# A difference in time is worth a word beyond these: see `_noticeable_s`.
_SHARE_OF_WALL, _LEAST_SHARE, _SHARE_OF_GAIN, _SECONDS = 0.05, 0.01, 0.25, 0.02
_SHARE_OF_IDLE = 0.25
FEWEST_RUNS = 3
_MOST_REASONS = 12


@dataclass(frozen=True)
class Verdict:
    """`name` is the verdict in the words of the module's head; `reasons` are sentences."""

    name: VerdictName
    reasons: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 0 if self.name in _GOOD else 1


@dataclass(frozen=True)
class Timed:
    """The repetitions of one step count, in the order in which they ran: A B A B."""

    steps: int
    a: tuple[RunResult, ...]
    b: tuple[RunResult, ...]

    @property
    def gain_s(self) -> float:
        """Seconds a run that A takes less than B, by their medians."""
        return median(run.wall_s for run in self.b) - median(run.wall_s for run in self.a)

    def gain_in_s(self, phase: str) -> float:
        """The same for one phase."""
        a, b = ([run.phases_s[phase] for run in runs] for runs in (self.a, self.b))
        return median(b) - median(a)


@dataclass(frozen=True)
class Compared:
    """All that a verdict rests on. `pairs`: by step count, A against B; `floors`: A against A, then
    B against B; `swaps`: each variant's pictures against those of other source images; `same_work`:
    jobs for which both variants did the very same, where they should not.
    """

    pairs: Mapping[int, Row]
    floors: tuple[Row, Row]
    other_seed: Row | None
    swaps: Mapping[str, Row]
    divergences: Sequence[Divergence]
    failures: Sequence[str]
    timed: Sequence[Timed]
    same_work: Sequence[str] = ()


def judge(compared: Compared, scenario: Scenario) -> Verdict:
    """The verdict on everything that was found."""
    faults = [*compared.failures, *_control_faults(compared)]
    has_fault = any(one.is_fault for one in compared.divergences)
    clock = [reason for timed in compared.timed for reason in time_faults(timed, scenario)]
    name = _by_pictures(compared)
    if name == "differs" or has_fault or compared.failures:
        return Verdict("differs", _said_once([*_differences(compared, scenario), *faults, *clock]))
    if faults or clock:
        return Verdict("not explained", _said_once([*faults, *clock]))
    return Verdict(name, (_as_words(name, compared),))


def time_faults(timed: Timed, scenario: Scenario) -> list[str]:
    """What the clock shows that the variants' difference does not explain.

    Medians are compared: a steady difference counts, a disturbed run does not. Fewer than three
    runs prove nothing.
    """
    if len(timed.a) < FEWEST_RUNS:
        return []
    return [*_gain_elsewhere(timed, scenario), *_waits(timed, scenario)]


def _gain_elsewhere(timed: Timed, scenario: Scenario) -> Iterator[str]:
    a, b = ([_elsewhere(run, scenario) for run in runs] for runs in (timed.a, timed.b))
    apart_s = median(b) - median(a)
    if not is_steady(a, b, _noticeable_s(timed)):
        return
    yield (
        f"{timed.steps} steps: {_slower(apart_s, scenario)} is {abs(apart_s):.2f} s a run slower "
        f"in {_largest(timed, scenario, apart_s)}, where the variants do the same; "
        f"the whole gain is {timed.gain_s:.2f} s"
    )


def _waits(timed: Timed, scenario: Scenario) -> Iterator[str]:
    # By process: each reads its weights, and waits for the disk.
    a, b = ([run.idle_s / run.processes for run in runs] for runs in (timed.a, timed.b))
    # Where other programs take the processor both variants wait, now more, now less.
    disturbed_s = _SHARE_OF_IDLE * min(median(a), median(b))
    if not is_steady(a, b, max(_noticeable_s(timed), disturbed_s)):
        return
    apart_s = median(b) - median(a)
    where = _largest(timed, scenario, apart_s, declared=True)
    yield (
        f"{timed.steps} steps: {_slower(apart_s, scenario)} waits {abs(apart_s):.2f} s "
        f"longer without any work, most likely in {where}: a sleep or a timeout, no computation"
    )


def _noticeable_s(timed: Timed) -> float:
    """Seconds worth a word: a good part of the gain, or of the run where there is hardly a gain."""
    wall_s = median(run.wall_s for run in timed.b)
    of_gain = max(_SHARE_OF_GAIN * abs(timed.gain_s), _LEAST_SHARE * wall_s)
    return max(_SECONDS, min(_SHARE_OF_WALL * wall_s, of_gain))


def _slower(apart_s: float, scenario: Scenario) -> str:
    return scenario.b.label if apart_s > 0 else scenario.a.label


def _elsewhere(run: RunResult, scenario: Scenario) -> float:
    """Seconds of a run in the phases that the variants do not change."""
    return sum(s for phase, s in run.phases_s.items() if not scenario.may_gain_in(phase))


def _largest(timed: Timed, scenario: Scenario, sign: float, *, declared: bool = False) -> str:
    """The phase that differs most in the direction of `sign`."""
    phases = [p for p in RUN_PHASES if declared or not scenario.may_gain_in(p)]

    direction = 1 if sign > 0 else -1
    return max(phases, key=lambda phase: direction * timed.gain_in_s(phase))


def _by_pictures(compared: Compared) -> VerdictName:
    rows = list(compared.pairs.values())
    if all(one.is_identical for one in rows):
        return "identical"
    if all(one.is_equal for one in rows):
        return "equal"
    worst = min(one.psnr for one in rows)
    # The plain variant's floor: one that A makes for itself by drawing at random excuses nothing.
    # Nor does any floor excuse what is as far apart as another seed.
    seed = -inf if compared.other_seed is None else compared.other_seed.psnr
    return "within floor" if worst >= compared.floors[1].psnr and worst > seed else "differs"


def _differences(compared: Compared, scenario: Scenario) -> list[str]:
    """How far apart the pictures are, then each stage that parts by more than rounding, the cause
    first; else where it begins.
    """
    causes = list(dict.fromkeys(str(one) for one in compared.divergences if one.is_fault))
    if not causes and compared.divergences:
        causes = [f"first differs at {compared.divergences[0]}"]
    distance = _distance(compared)
    restless = [
        f"{label} does not repeat itself: {floor.psnr:.1f} dB from run to run"
        for label, floor in zip((scenario.a.label, scenario.b.label), compared.floors, strict=True)
        if not floor.is_identical
    ]
    return [*([distance] if distance else []), *causes, *restless]


def _distance(compared: Compared) -> str:
    worst = min(compared.pairs.values(), key=lambda one: one.psnr)
    if worst.is_equal:
        return ""
    if worst.missing:
        return f"{worst.name}: no pair of pictures of one size for {', '.join(worst.missing)}"
    floor = compared.floors[1].psnr
    below = "where the plain variant repeats itself exactly"
    if floor != float("inf"):
        side = "below" if worst.psnr < floor else "above"
        below = f"{abs(floor - worst.psnr):.1f} dB {side} the floor of {floor:.1f} dB"
    seed = ""
    if compared.other_seed is not None and worst.psnr <= compared.other_seed.psnr:
        seed = f"; another seed gives {compared.other_seed.psnr:.1f} dB: no nearer than that"
    return f"the pictures are {worst.psnr:.1f} dB apart, {below}{seed}"


def _control_faults(compared: Compared) -> list[str]:
    """Inputs without influence, and variants without a difference."""
    faults = [
        f"other source images leave the pictures of {label} as they are "
        f"({', '.join(swap.unchanged)}): the image does not reach the diffusion stage"
        for label, swap in compared.swaps.items()
        if swap.unchanged
    ]
    seed = compared.other_seed
    if seed is not None and seed.unchanged:
        faults.append(f"another seed leaves {', '.join(seed.unchanged)} as it is")
    if compared.same_work:
        jobs = ", ".join(compared.same_work)
        faults.append(f"both variants did the same work for {jobs}: nothing was compared")
    return faults


def _as_words(name: VerdictName, compared: Compared) -> str:
    rows = list(compared.pairs.values())
    if name == "identical":
        count = sum(len(one.distances) for one in rows)
        return f"every value of {count} pairs of pictures is the same"
    most = max(d.max_abs for one in rows for d in one.distances.values())
    share = 1 - min(d.equal_share for one in rows for d in one.distances.values())
    if name == "equal":
        return f"at most {share:.2%} of a picture's values are off, by {most} level"
    floor, worst = compared.floors[1].psnr, min(one.psnr for one in rows)
    return f"{worst:.1f} dB, where a variant reaches {floor:.1f} dB against itself"


def _said_once(reasons: Sequence[str]) -> tuple[str, ...]:
    once = tuple(dict.fromkeys(reasons))
    more = len(once) - _MOST_REASONS
    return once if more <= 0 else (*once[:_MOST_REASONS], f"and {more} more, in bench.json")
