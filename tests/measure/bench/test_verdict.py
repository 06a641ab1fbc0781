"""The six words, from made-up runs: each is reached, and none by accident."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from hyimg_cli.measure.bench.budget import DistanceRow
from hyimg_cli.measure.bench.runs import RUN_PHASES, RunResult
from hyimg_cli.measure.bench.scenario import read_scenario
from hyimg_cli.measure.bench.verdict import Comparison, Findings, Timed, clock_notes
from hyimg_cli.quality.metrics import PIXEL_METRICS, Distance

SCENARIO = read_scenario("kv-reuse").pairs[0]
SAME: Distance = {
    name: inf if name == "psnr" else 0 if name == "max_abs" else 1.0 for name in PIXEL_METRICS
}
ONE_LEVEL = {**SAME, "psnr": 75.2, "max_abs": 1, "equal_share": 0.9981}
APART = {**SAME, "psnr": 30.0, "ssim": 0.9, "max_abs": 40, "equal_share": 0.5}


def run(*, idle_s: float = 0.0, **phases: float) -> RunResult:
    seconds = {phase: phases.get(phase, 0.1) for phase in RUN_PHASES}
    return RunResult(Path(), sum(seconds.values()), idle_s, seconds, ())


def timed(a: Sequence[RunResult], b: Sequence[RunResult]) -> list[Timed]:
    return [Timed(8, tuple(a), tuple(b))]


def pair(distance: Distance) -> DistanceRow:
    return DistanceRow("A vs B", {"job": distance})


EVEN = timed([run() for _ in range(5)], [run() for _ in range(5)])
CLEAN = Comparison(
    scenario=SCENARIO,
    pairs={8: pair(SAME)},
    floors=(pair(SAME), pair(SAME)),
    other_seed=pair({**APART, "psnr": 28.0}),
    failures=(),
    timed=EVEN,
)


@pytest.mark.parametrize(
    ("distance", "floor", "name", "code"),
    [
        (SAME, SAME, "identical", 0),
        (ONE_LEVEL, SAME, "equal", 0),
        ({**ONE_LEVEL, "equal_share": 0.9979}, SAME, "differs", 1),
        ({**ONE_LEVEL, "max_abs": 2}, SAME, "differs", 1),
        (APART, {**APART, "psnr": 29.0}, "within floor", 0),
        (APART, {**APART, "psnr": 31.0}, "differs", 1),
    ],
)
def test_pictures_against_their_floor(
    distance: Distance, floor: Distance, name: str, code: int
) -> None:
    floors = pair(SAME), pair(floor)
    found = replace(CLEAN, pairs={8: pair(distance)}, floors=floors).verdict
    assert (found.name, found.exit_code) == (name, code)
    assert found.reasons


@pytest.mark.parametrize(("other", "name"), [(ONE_LEVEL, "equal"), (APART, "differs")])
def test_the_step_count_that_differs_most_decides(other: Distance, name: str) -> None:
    for counts in ((2, 8), (8, 2)):
        pairs = dict(zip(counts, (pair(SAME), pair(other)), strict=True))
        assert replace(CLEAN, pairs=pairs).verdict.name == name


@pytest.mark.parametrize(
    ("psnr", "seed", "rival", "name", "why"),
    [
        (45.0, 28.0, 40.0, "as declared", "45.0 dB or more, where 40.0 dB for plain: a lossy"),
        (29.0, 28.0, 20.0, "differs", "8 steps: 29.0 dB, below the declared 30 dB"),
        (45.0, 45.0, 40.0, "differs", "8 steps: 45.0 dB, no closer than another seed"),
        (45.0, 28.0, 45.0, "differs", "8 steps: 45.0 dB, and 45.0 dB for plain"),
        (inf, 28.0, 40.0, "identical", "is the same"),
    ],
)
def test_a_declared_loss_is_held_against_what_it_must_beat(
    psnr: float, seed: float, rival: float, name: str, why: str
) -> None:
    apart = SAME if psnr == inf else {**APART, "psnr": psnr}
    found = replace(
        CLEAN,
        scenario=replace(SCENARIO, least_psnr=30.0),
        pairs={8: pair(apart)},
        other_seed=pair({**APART, "psnr": seed}),
        rivals={8: replace(pair({**APART, "psnr": rival}), name="plain")},
    ).verdict
    assert (found.name, found.exit_code) == (name, int(name == "differs"))
    assert why in found.reasons[0]


def test_a_declared_loss_without_skipped_steps_is_held_against_another_seed() -> None:
    found = replace(
        CLEAN,
        scenario=replace(SCENARIO, least_psnr=30.0),
        pairs={8: pair({**APART, "psnr": 45.0})},
        other_seed=replace(pair({**APART, "psnr": 28.0}), name="another seed"),
        rivals={},
    ).verdict
    assert found.name == "as declared"
    assert found.reasons[0].startswith("45.0 dB or more, where 28.0 dB for another seed: a lossy")


def test_a_loss_that_was_not_declared_is_none() -> None:
    rivals = {8: pair({**APART, "psnr": 20.0})}
    assert replace(CLEAN, pairs={8: pair(APART)}, rivals=rivals).verdict.name == "differs"


def test_a_difference_names_its_distance_to_floor_and_seed() -> None:
    compared = replace(
        CLEAN,
        pairs={8: pair({**APART, "psnr": 10.2})},
        floors=(pair(SAME), pair({**APART, "psnr": 26.7})),
    )
    reason = compared.verdict.reasons[0]
    assert "10.2 dB apart, 16.5 dB below the floor of 26.7 dB" in reason
    assert "another seed gives 28.0 dB, which is no further apart" in reason


def test_no_floor_excuses_what_is_as_far_as_another_seed() -> None:
    """10.2 dB with a floor of 9 dB of A's own making, where another seed gives 12.4 dB."""
    restless, far = pair({**APART, "psnr": 9.0}), pair({**APART, "psnr": 10.2})
    seed = pair({**APART, "psnr": 12.4})
    for floors in ((restless, pair(SAME)), (restless, restless)):
        found = replace(CLEAN, pairs={8: far}, floors=floors, other_seed=seed).verdict
        assert found.name == "differs"
        assert any("reuse does not repeat itself: 9.0 dB" in one for one in found.reasons)


def test_the_plain_variants_floor_alone_excuses_a_distance() -> None:
    """30 dB, where the quicker variant is 29 dB from itself and another seed gives 28 dB."""
    restless = pair({**APART, "psnr": 29.0})
    for floors, name in (
        ((restless, pair(SAME)), "differs"),
        ((restless, pair({**APART, "psnr": 31.0})), "differs"),
        ((pair(SAME), restless), "within floor"),
    ):
        found = replace(CLEAN, pairs={8: pair(APART)}, floors=floors).verdict
        assert found.name == name


def test_variants_that_do_the_same_compare_nothing() -> None:
    found = replace(CLEAN, same_work=("job",)).verdict
    assert found.name == "not explained"
    assert "both variants did the same work for job" in found.reasons[0]


def test_another_seed_must_change_the_picture() -> None:
    found = replace(CLEAN, other_seed=pair(SAME)).verdict
    assert found.reasons == ("another seed does not change job",)


def test_a_failed_job_differs() -> None:
    missing = DistanceRow("A vs B", {}, missing=("job",))
    compared = replace(CLEAN, pairs={8: missing}, failures=["job: out of memory"])
    found = compared.verdict
    assert found.name == "differs"
    assert "job: out of memory" in found.reasons


@pytest.mark.parametrize(
    ("slow", "says"),
    [
        ({"decode_latents": 0.4}, "recompute once is 0.30 s a run slower in decode_latents"),
        ({"prefill": 0.4, "idle_s": 0.3}, "recompute once waits 0.30 s longer"),
    ],
)
def test_a_gain_from_elsewhere(slow: dict[str, float], says: str) -> None:
    b = [run(**slow) for _ in range(5)]  # type: ignore[arg-type]
    found = replace(CLEAN, timed=timed([run() for _ in range(5)], b)).verdict
    assert found.name == "not explained"
    assert says in found.reasons[0]


def test_a_timeout_that_spares_one_run_or_is_small_beside_the_run_is_named() -> None:
    even = [run() for _ in range(5)]
    spared = [*(run(denoise_rest=30.1, idle_s=30.0) for _ in range(4)), run()]
    long = [run(denoise_rest=600.0) for _ in range(5)]
    longer = [run(denoise_rest=600.0, think=30.1) for _ in range(5)]
    for a, b in ((even, spared), (long, longer)):
        found = replace(CLEAN, timed=timed(a, b)).verdict
        assert found.name == "not explained"
        assert "recompute once is 30.00 s a run slower" in found.reasons[0]


def test_a_wait_is_held_against_that_of_the_variant_that_waits_less() -> None:
    """1.3 s beside 1.0 s: more than a quarter of the one, less than a quarter of the other."""
    short, long = ([run(idle_s=wait) for _ in range(5)] for wait in (1.0, 1.3))
    for a, b, label in ((short, long, "recompute once"), (long, short, "reuse")):
        found = replace(CLEAN, timed=timed(a, b)).verdict
        assert found.name == "not explained"
        assert f"{label} waits 0.30 s longer" in found.reasons[0]


def test_a_gain_where_it_may_be_is_explained() -> None:
    b = [run(prefill=0.9, kv_handoff=0.2) for _ in range(5)]
    assert replace(CLEAN, timed=timed([run() for _ in range(5)], b)).verdict.exit_code == 0


def test_noise_is_no_reason() -> None:
    """One disturbed run; a steady difference too small to matter; a busy machine; two runs."""
    even = [run() for _ in range(5)]
    disturbed = [run(think=0.9), *even[:4]]
    steady = [run(think=0.11) for _ in range(5)]
    busy = [run(idle_s=0.5) for _ in range(5)], [run(idle_s=0.6) for _ in range(5)]
    two = even[:2], [run(think=0.9) for _ in range(2)]
    for a, b in ((even, disturbed), (even, steady), busy, two):
        assert replace(CLEAN, timed=timed(a, b)).verdict.name == "identical"


def runs(*walls: float) -> list[RunResult]:
    """Runs of these seconds, all of them where the variants may differ."""
    return [
        RunResult(Path(), s, 0.0, dict.fromkeys(RUN_PHASES, 0.0) | {"prefill": s}, ())
        for s in walls
    ]


@pytest.mark.parametrize(
    ("a", "b", "vary"),
    [
        ((1.0, 5.5, 2.0, 3.0, 1.5), (2.0, 1.2, 4.0, 1.4, 3.0), "reuse vary 5.5x"),
        ((9.8, 11.4), (11.7, 12.0), "reuse vary 1.2x"),
        ((1.0, 1.0, 1.0), (1.0, 1.5, 1.0), "recompute once vary 1.5x"),
    ],
)
def test_a_clock_that_tells_nothing_is_said_and_changes_no_verdict(
    a: tuple[float, ...], b: tuple[float, ...], vary: str
) -> None:
    found = replace(CLEAN, timed=timed(runs(*a), runs(*b))).verdict
    assert (found.name, found.exit_code) == ("identical", 0)
    assert found.reasons[1:] == (f"time: not resolved, runs of {vary} at 8 steps",)
    worse = replace(CLEAN, pairs={8: pair(APART)}, timed=timed(runs(*a), runs(*b))).verdict
    assert worse.reasons[-1] == found.reasons[1]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1.0, 1.1, 1.0, 1.05, 1.0), (3.0, 3.4, 3.1, 2.9, 3.0)),  # far apart, whatever the noise
        ((1.0, 1.0, 1.0, 1.0, 5.5), (1.3, 1.3, 1.3, 1.3, 1.3)),  # steady but for one run
        ((1.0, 1.02, 1.01), (1.0, 1.01, 1.03)),  # equally fast, and known to be
        ((1.0,), (1.0,)),
    ],
)
def test_a_clock_that_tells_something_is_left_alone(
    a: tuple[float, ...], b: tuple[float, ...]
) -> None:
    found = replace(CLEAN, timed=timed(runs(*a), runs(*b))).verdict
    assert found.reasons == replace(CLEAN, timed=EVEN).verdict.reasons


def test_a_speed_up_agrees_with_the_medians_beside_it_or_says_why() -> None:
    (even,) = timed(runs(1.0, 1.01, 1.0), runs(2.0, 2.02, 2.0))
    assert (even.speedup["median"], even.speedup_of_medians) == (2.0, 2.0)
    assert list(clock_notes(even)) == []
    # The machine slows down: each pair says 3, the medians do not.
    (slowing,) = timed(runs(1.0, 1.5, 1.4), runs(3.0, 4.5, 3.8))
    assert slowing.is_resolved
    (note,) = clock_notes(slowing)
    assert "speed-up of 3.000 is the median of ratios" in note
    assert "the medians of all runs give 2.714" in note


def test_of_several_pairs_the_worst_decides_and_each_reason_names_its_pair() -> None:
    scenario = read_scenario("kv-reuse")
    compared = [replace(CLEAN, scenario=pair) for pair in scenario.pairs]
    assert Findings(scenario, compared, (), (), Path()).verdict.name == "identical"
    compared[1] = replace(compared[1], pairs={8: pair(APART)})
    found = Findings(scenario, compared, (), (), Path())
    assert (found.verdict.name, found.verdict.exit_code) == ("differs", 1)
    first, *others = found.verdict.reasons
    assert first.startswith("reuse vs recompute every step: the pictures are 30.0 dB apart")
    assert [one.partition(":")[0] for one in others] == [
        "reuse vs recompute once",
        "recompute once vs recompute every step",
    ]
