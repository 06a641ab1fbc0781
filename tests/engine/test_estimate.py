"""Seconds of a plan by synthetic timings: lines, spreads, threads, replicas, busy machines."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hyimg_cli.engine.timing.estimate import Estimate, Machine, estimate, line, predicted
from hyimg_cli.engine.timing.observed import GroupTiming, RunTiming, Sample
from hyimg_cli.engine.timing.planned import GroupWork

MACHINE = Machine(threads=1, cores=2, others=0.0, is_cpu=True)
CALL, UNIT = 0.02, 0.003


def took(calls: float, units: float, noise: float = 0.0) -> Sample:
    return Sample(calls, units, (CALL * calls + UNIT * units) * (1 + random.uniform(-noise, noise)))


def run(jobs: int, together: int, *, noise: float = 0.0, size: str = "auto") -> RunTiming:
    """A run of `jobs` pictures of 20 steps, so many drawn together."""
    denoise = took(20 * jobs / together, 20 * jobs, noise)
    group = GroupTiming(size, jobs, {"denoise": denoise, "rest": Sample(jobs, 0, 0.01 * jobs)})
    return RunTiming(1, 0.0, {"load": Sample(1, 1, 3.0), "start": Sample(1, 0, 2.0)}, (group,))


def work(jobs: int, together: int, *, size: str = "auto", model: str = "m") -> GroupWork:
    phases = {"denoise": (20 * jobs / together, 20.0 * jobs), "rest": (float(jobs), 0.0)}
    return GroupWork(model, size, jobs, phases)


def true_s(jobs: int, together: int) -> float:
    return 5.0 + CALL * 20 * jobs / together + (UNIT * 20 + 0.01) * jobs


def of(works: Sequence[GroupWork], runs: Sequence[RunTiming], **machine: float) -> Estimate:
    return estimate(works, {"m": runs}, replace(MACHINE, **machine))


def test_a_line_is_found_where_samples_tell_calls_and_units_apart() -> None:
    found = line([took(20, 20), took(20, 160), took(40, 640)])
    assert found == pytest.approx((CALL, UNIT), rel=0.1)


@pytest.mark.parametrize("units", [[5.0, 5.0], [0.0, 0.0], [3.0]])
def test_where_nothing_tells_them_apart_the_sample_itself_is_met(units: list[float]) -> None:
    samples = [Sample(10, 10 * per_call, 4.0) for per_call in units]
    by_call, by_unit = line(samples)
    assert by_call >= 0 <= by_unit
    for one in samples:
        assert by_call * one.calls + by_unit * one.units == pytest.approx(one.seconds, rel=0.01)


def test_no_rate_is_ever_negative() -> None:
    for _ in range(300):
        samples = [
            Sample(random.randint(1, 50), random.randint(0, 500), random.choice((0.0, 0.1, 1, 9)))
            for _ in range(random.randint(1, 6))
        ]
        by_call, by_unit = line(samples)
        assert by_call >= 0 <= by_unit
        found = predicted(random.randint(1, 99), random.randint(0, 99), samples)
        assert 0 <= found.low <= found.middle <= found.high


def test_what_no_run_had_is_between_all_by_calls_and_all_by_units() -> None:
    found = predicted(20, 320, [Sample(20, 20, 1.0)])
    assert (found.low, found.high) == (1.0, 16.0)
    assert 1.0 < found.middle < 16.0
    same = predicted(40, 40, [Sample(20, 20, 1.0)])
    assert (same.low, same.high) == pytest.approx((2.0, 2.0), rel=0.01)


def test_other_manifests_are_estimated_within_a_quarter() -> None:
    """Of runs of other numbers of jobs and batch sizes, each 10 % off."""
    runs = [run(8, 8, noise=0.1), run(2, 2, noise=0.1), run(30, 16, noise=0.1)]
    for jobs, together in ((500, 16), (1, 1), (12, 4), (3, 3)):
        found = of([work(jobs, together)], runs)
        assert found.all.middle == pytest.approx(true_s(jobs, together), rel=0.25)
        assert found.all.low < true_s(jobs, together) < found.all.high
        assert (found.runs, found.trials, found.unknown) == (3, 0, ())


def test_more_runs_that_agree_narrow_the_spread() -> None:
    one, three = ([run(8, 8)] * count for count in (1, 3))
    first, later = of([work(8, 8)], one).all, of([work(8, 8)], three).all
    assert later.high - later.low < first.high - first.low


def test_runs_that_disagree_widen_it() -> None:
    slow = run(8, 8)
    slow = replace(
        slow, groups=(replace(slow.groups[0], phases={"denoise": Sample(20, 160, 3.0)}),)
    )
    calm = of([work(8, 8)], [run(8, 8)] * 4).all
    wild = of([work(8, 8)], [*[run(8, 8)] * 3, slow]).all
    assert wild.high / wild.middle > 1.3 * calm.high / calm.middle


def test_a_model_without_runs_makes_the_time_unknown() -> None:
    found = estimate([work(1, 1), work(1, 1, model="n")], {"m": [run(8, 8)], "n": []}, MACHINE)
    assert found.unknown == ("n",)
    loaded_only = replace(run(8, 8), groups=())
    assert of([work(1, 1)], [loaded_only]).unknown == ("m",)


def test_nothing_to_run_takes_no_time() -> None:
    found = estimate([], {}, MACHINE)
    assert (found.all.middle, found.unknown, dict(found.parts)) == (0, (), {})


def test_two_models_are_loaded_one_after_the_other_and_begun_once() -> None:
    alone = of([work(8, 8)], [run(8, 8)])
    both = estimate(
        [work(8, 8), work(8, 8, model="n")], {"m": [run(8, 8)], "n": [run(8, 8)]}, MACHINE
    )
    assert both.parts["load"].middle == pytest.approx(2 * alone.parts["load"].middle)
    assert both.parts["start"].middle == pytest.approx(alone.parts["start"].middle)


def test_groups_of_the_same_size_count_first() -> None:
    large = run(8, 8, size="1024x1024")
    large = replace(
        large,
        groups=tuple(
            replace(group, phases={"denoise": Sample(20, 160, 60.0)}) for group in large.groups
        ),
    )
    runs = [run(8, 8), large]
    assert of([work(8, 8)], runs).parts["denoise"].middle < 2
    assert of([work(8, 8, size="1024x1024")], runs).parts["denoise"].middle > 40
    neither = of([work(8, 8, size="64x64")], runs).parts["denoise"]
    assert neither.low < 1
    assert neither.high > 60


def test_replicas_share_the_jobs_and_load_at_once() -> None:
    one = of([work(40, 8)], [run(40, 8)])
    four = of([work(40, 8)], [run(40, 8)], replicas=4, cores=8)
    assert four.parts["denoise"].middle == pytest.approx(one.parts["denoise"].middle / 4)
    assert four.parts["load"].middle == pytest.approx(one.parts["load"].middle)


def test_a_busy_machine_takes_longer_and_the_spread_holds_both() -> None:
    idle = of([work(8, 8)], [run(8, 8)] * 3)
    busy = of([work(8, 8)], [run(8, 8)] * 3, others=2.0)
    assert busy.slowdown == 1.5
    assert busy.all.low == pytest.approx(idle.all.low)
    assert busy.all.high > 1.5 * idle.all.high
    assert busy.all.middle == pytest.approx(1.5 * idle.all.middle)
    room = of([work(8, 8)], [run(8, 8)] * 3, others=0.5)
    assert room.all == idle.all  # twice as much still leaves a core
    gpu = of([work(8, 8)], [run(8, 8)] * 3, others=2.0, is_cpu=False)
    assert gpu.all == idle.all


def test_what_a_run_took_beside_others_is_not_taken_for_its_own() -> None:
    slow = replace(run(8, 8), others=3.0)
    groups = tuple(
        replace(
            group, phases={n: replace(s, seconds=2 * s.seconds) for n, s in group.phases.items()}
        )
        for group in slow.groups
    )
    slow = replace(slow, groups=groups, phases={})
    quiet = of([work(8, 8)], [run(8, 8), slow, slow])
    assert quiet.parts["denoise"] == of([work(8, 8)], [run(8, 8)]).parts["denoise"]
    assert of([work(8, 8)], [slow]).parts["denoise"].middle == pytest.approx(
        quiet.parts["denoise"].middle, rel=0.01
    )


def test_runs_of_as_many_threads_count_first() -> None:
    eight = replace(run(8, 8), threads=8, phases={"load": Sample(1, 1, 1.0)})
    assert of([work(8, 8)], [run(8, 8), eight]).parts["load"].middle == pytest.approx(3.0)
    assert of([work(8, 8)], [eight]).parts["load"].middle == pytest.approx(1.0)
