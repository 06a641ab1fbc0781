"""What a comparison comes to, in one of five words, and why.

    identical · equal · within floor    exit code 0
    differs · not explained             exit code 1

Pictures decide first, then the clock: a gain that the variant's own phases do not show has another
cause, and pictures that are the same do not excuse it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hyimg_cli.bench.budget import Row
from hyimg_cli.bench.divergence import Divergence
from hyimg_cli.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.bench.scenario import Scenario
from hyimg_cli.bench.stats import gap

VerdictName = Literal["identical", "equal", "within floor", "differs", "not explained"]
_GOOD = ("identical", "equal", "within floor")
# A difference in time is worth a word beyond both of these.
_SHARE_OF_WALL, _SECONDS = 0.05, 0.02
_SHARE_OF_IDLE = 0.25
_FEWEST_RUNS = 3
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


@dataclass(frozen=True)
class Compared:
    """All that a verdict rests on. `pairs`: by step count, A against B; `floors`: A against A and B
    against B; `swaps`: each variant's pictures against those of other source images.
    """

    pairs: Mapping[int, Row]
    floors: Sequence[Row]
    other_seed: Row | None
    swaps: Mapping[str, Row]
    divergences: Sequence[Divergence]
    failures: Sequence[str]
    timed: Sequence[Timed]


def judge(compared: Compared, scenario: Scenario) -> Verdict:
    """The verdict on everything that was found."""
    faults = [*compared.failures, *_control_faults(compared)]
    structural = [one for one in compared.divergences if one.is_structural]
    clock = [reason for timed in compared.timed for reason in time_faults(timed, scenario)]
    name = _by_pictures(compared)
    if name == "differs" or structural or compared.failures:
        reasons = [*_differences(compared), *faults, *clock]
        return Verdict("differs", _said_once(reasons))
    if faults or clock:
        return Verdict("not explained", _said_once([*faults, *clock]))
    return Verdict(name, (_as_words(name, compared),))


def time_faults(timed: Timed, scenario: Scenario) -> list[str]:
    """What the clock shows that the variants' difference does not explain.

    Every run of one variant must be slower than every run of the other, by more than is worth a
    word: one disturbed run proves nothing, and fewer than three runs do not either.
    """
    if len(timed.a) < _FEWEST_RUNS:
        return []
    return [*_gain_elsewhere(timed, scenario), *_waits(timed, scenario)]


def _gain_elsewhere(timed: Timed, scenario: Scenario) -> Iterator[str]:
    a, b = timed.a, timed.b
    rest = [[_elsewhere(run, scenario) for run in runs] for runs in (a, b)]
    if abs(gap(*rest)) <= _noticeable_s(timed):
        return
    apart_s = median(rest[1]) - median(rest[0])
    gain_s = median(run.wall_s for run in b) - median(run.wall_s for run in a)
    yield (
        f"{timed.steps} steps: {_slower(apart_s, scenario)} is {abs(apart_s):.2f} s a run slower "
        f"in {_largest(timed, scenario, apart_s)}, where the variants do the same; "
        f"the whole gain is {gain_s:.2f} s"
    )


def _waits(timed: Timed, scenario: Scenario) -> Iterator[str]:
    if {scenario.a.lifetime, scenario.b.lifetime} != {"session"}:
        return  # the thread that works is in another process
    idle = [[run.idle_s for run in runs] for runs in (timed.a, timed.b)]
    # Where other programs take the processor both variants wait, now more, now less.
    disturbed_s = _SHARE_OF_IDLE * min(median(side) for side in idle)
    if abs(gap(*idle)) <= max(_noticeable_s(timed), disturbed_s):
        return
    apart_s = median(idle[1]) - median(idle[0])
    where = _largest(timed, scenario, apart_s, declared=True)
    yield (
        f"{timed.steps} steps: {_slower(apart_s, scenario)} waits {abs(apart_s):.2f} s a run "
        f"longer without any work, most likely in {where}: a sleep or a timeout, no computation"
    )


def _noticeable_s(timed: Timed) -> float:
    return max(_SHARE_OF_WALL * median(run.wall_s for run in timed.b), _SECONDS)


def _slower(apart_s: float, scenario: Scenario) -> str:
    return scenario.b.label if apart_s > 0 else scenario.a.label


def _elsewhere(run: RunResult, scenario: Scenario) -> float:
    """Seconds of a run in the phases that the variants do not change."""
    return sum(s for phase, s in run.phases_s.items() if not scenario.may_gain_in(phase))


def _largest(timed: Timed, scenario: Scenario, sign: float, *, declared: bool = False) -> str:
    """The phase that differs most in the direction of `sign`."""
    phases = [p for p in RUN_PHASES if declared or not scenario.may_gain_in(p)]

    def apart(phase: str) -> float:
        a, b = ([run.phases_s[phase] for run in runs] for runs in (timed.a, timed.b))
        return median(b) - median(a)

    return max(phases, key=lambda phase: apart(phase) * (1 if sign > 0 else -1))


def _by_pictures(compared: Compared) -> VerdictName:
    rows = list(compared.pairs.values())
    if all(one.is_identical for one in rows):
        return "identical"
    if all(one.is_equal for one in rows):
        return "equal"
    floor = min(one.psnr for one in compared.floors)
    return "within floor" if all(one.psnr >= floor for one in rows) else "differs"


def _differences(compared: Compared) -> list[str]:
    """The cause first: structural differences, then the first stage that parts by more than
    rounding, then how far apart the pictures are.
    """
    first: dict[str, Divergence] = {}
    for one in compared.divergences:
        if one.is_fault:
            first.setdefault(f"{one.stage} {one.where}", one)
    causes = [str(one) for one in first.values()]
    distance = _distance(compared)
    if not causes and compared.divergences:
        causes = [f"first differs at {compared.divergences[0]}"]
    return [*([distance] if distance else []), *causes]


def _distance(compared: Compared) -> str:
    worst = min(compared.pairs.values(), key=lambda one: one.psnr)
    if worst.is_equal:
        return ""
    if worst.missing:
        return f"{worst.name}: no pair of pictures of one size for {', '.join(worst.missing)}"
    floor = min(one.psnr for one in compared.floors)
    below = "the variants repeat themselves exactly"
    if floor != float("inf"):
        below = f"{floor - worst.psnr:.1f} dB below the floor of {floor:.1f} dB"
    seed = ""
    if compared.other_seed is not None and worst.psnr <= compared.other_seed.psnr:
        seed = f"; another seed gives {compared.other_seed.psnr:.1f} dB: no nearer than that"
    return f"the pictures are {worst.psnr:.1f} dB apart, {below}{seed}"


def _control_faults(compared: Compared) -> list[str]:
    """Source images that have no influence."""
    return [
        f"other source images leave the pictures of {label} as they are "
        f"({', '.join(swap.unchanged)}): the image does not reach the diffusion stage"
        for label, swap in compared.swaps.items()
        if swap.unchanged
    ]


def _as_words(name: VerdictName, compared: Compared) -> str:
    rows = list(compared.pairs.values())
    if name == "identical":
        count = sum(len(one.distances) for one in rows)
        return f"every value of {count} pairs of pictures is the same"
    most = max(d.max_abs for one in rows for d in one.distances.values())
    share = 1 - min(d.equal_share for one in rows for d in one.distances.values())
    if name == "equal":
        return f"at most {share:.2%} of a picture's values are off, by {most} level"
    floor, worst = min(one.psnr for one in compared.floors), min(one.psnr for one in rows)
    return f"{worst:.1f} dB, where a variant reaches {floor:.1f} dB against itself"


def _said_once(reasons: Sequence[str]) -> tuple[str, ...]:
    once = tuple(dict.fromkeys(reasons))
    more = len(once) - _MOST_REASONS
    return once if more <= 0 else (*once[:_MOST_REASONS], f"and {more} more, in bench.json")
