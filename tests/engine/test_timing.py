"""What runs leave behind of their seconds: gathered from events, kept on disk, read by plans."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hyimg_cli.cache.disk import RATES, DiskStore
from hyimg_cli.engine.timing import machine, observed
from hyimg_cli.engine.timing.machine import Processors, slowdown
from hyimg_cli.engine.timing.observed import (
    GroupTiming,
    KeptTimings,
    RunTiming,
    Sample,
    TextLengths,
    conditions,
)
from hyimg_cli.engine.timing.watch import Watch
from hyimg_cli.spec.events import (
    BranchTokens,
    GroupStarted,
    JobDone,
    JobFailed,
    ModelLoaded,
    ModelLoading,
    Outcome,
    OutputFile,
    Prewarmed,
    ReuseReport,
)
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Group, Plan
from hyimg_cli.spec.run import BatchConfig, CacheConfig, ModelChoice, OutputConfig, RunConfig

TIMING = RunTiming(
    2,
    0.25,
    {"load": Sample(1, 1, 3.5)},
    (
        GroupTiming(
            "auto",
            3,
            {"denoise": Sample(20, 60, 1.5)},
            {"think": 3, "denoise": 3},
            {"think": TextLengths(3, 12.5, 20)},
        ),
    ),
)


def config(folder: Path | None, **parts: object) -> RunConfig:
    given = {"cache": CacheConfig(folder)} | parts
    return RunConfig(OutputConfig(Path("out")), **given)  # type: ignore[arg-type]


def outcome(name: str, *, together: int, tokens: int = 0) -> Outcome:
    branches = (BranchTokens(10, 0, 4, 16), BranchTokens(0, 8, 2, 16))
    return Outcome(
        name,
        "done",
        key="",
        outputs=(OutputFile(f"{name}.png", "", "", 64, 32, 0),),
        denoise_steps=20,
        share_s={"prefill": 0.1, "think": 0.2, "denoise_first": 0.1, "denoise_rest": 0.4,
                 "decode_latents": 0.05, "total": 0.85},
        kv_reuse=ReuseReport("hit", 30, 5, tokens, branches),
        batch={"think": together, "denoise": together},
        cache={"source_images": {"memory_hits": 0, "disk_hits": 0, "misses": 2}},
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plan(job: ImageJob) -> Plan:
    jobs = tuple(replace(job, custom_id=name) for name in "abc")
    return Plan((Group("tiny-image", "auto", jobs),))


def test_events_become_calls_units_and_seconds(plan: Plan) -> None:
    clock = Clock()
    watch = Watch(plan, config(None), began=8.0, clock=clock)
    clock.now = 12.0
    watch.add(ModelLoading("tiny-image"))
    watch.add(ModelLoaded("tiny-image", 3.0, "cpu", "float32", 1))
    watch.add(Prewarmed(2, 0.5))
    watch.add(GroupStarted("tiny-image", "auto", 3))
    clock.now = 15.0
    for name, tokens in zip("abc", (8, 20, 0), strict=True):
        watch.add(JobDone(outcome(name, together=3, tokens=tokens)))
    clock.now = 16.0
    ((model, timing),) = watch.timings()
    assert model == "tiny-image"
    assert timing.phases == {
        "start": Sample(1, 0, 4.0),
        "load": Sample(1, 1, 3.0),
        "prewarm": Sample(2, 0, 0.5),
        "end": Sample(1, 3, 1.0),
    }
    (group,) = timing.groups
    assert (group.size_class, group.jobs, group.limits) == ("auto", 3, {})
    assert group.texts == {plan.groups[0].jobs[0].bot_task: TextLengths(2, 14.0, 20)}
    found = {name: (one.calls, one.units) for name, one in group.phases.items()}
    assert found == {
        "encode": (3, 2),
        "prefill": (3, 3 * (30 + 6)),
        "think": (20, 28),
        "denoise": (20, 3 * 20 * 32),
        "decode": (3, 3 * 64 * 32),
        "rest": (3, 0),
    }
    assert group.phases["denoise"].seconds == pytest.approx(1.5)
    assert group.phases["rest"].seconds == pytest.approx(3.0 - 3 * 0.85)


def test_fewer_together_than_could_be_is_what_memory_had_room_for(plan: Plan) -> None:
    jobs = {"a": 20, "b": 20, "c": 30}
    for most, limits in ((16, {"denoise": 1, "think": 1}), (1, {})):
        watch = Watch(plan, config(None, batch=BatchConfig(max_size=most)), began=0.0)
        watch.add(GroupStarted("tiny-image", "auto", 3))
        for name, steps in jobs.items():
            done = replace(outcome(name, together=1, tokens=4), denoise_steps=steps)
            watch.add(JobDone(done))
        ((_, timing),) = watch.timings()
        assert timing.groups[0].limits == limits
    watch = Watch(plan, config(None), began=0.0)
    watch.add(GroupStarted("tiny-image", "auto", 3))
    for number, name in enumerate(jobs):  # of other steps each: they cannot be drawn together
        done = replace(outcome(name, together=1), denoise_steps=number + 1)
        watch.add(JobDone(done))
    ((_, timing),) = watch.timings()
    assert timing.groups[0].limits == {}


def test_of_a_group_that_is_not_whole_what_was_done_counts(plan: Plan) -> None:
    clock = Clock()
    watch = Watch(plan, config(None), began=8.0, clock=clock)
    watch.add(GroupStarted("tiny-image", "auto", 3))
    watch.add(JobDone(outcome("a", together=1)))
    watch.add(JobFailed(Outcome("b", "failed", key="")))
    ((_, timing),) = watch.timings()
    assert timing.groups[0].jobs == 1
    assert "rest" not in timing.groups[0].phases
    empty = Watch(plan, config(None), began=8.0, clock=clock)
    empty.add(ModelLoaded("tiny-image", 3.0, "cpu", "float32", 1))
    assert list(empty.timings()) == []


def test_a_timing_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    store, key = KeptTimings(config(tmp_path)), "a" * 64
    assert store.of(key) == []
    for threads in (1, 2, 3):
        store.keep(key, replace(TIMING, threads=threads))
    store.keep("b" * 64, TIMING)
    assert [one.threads for one in KeptTimings(config(tmp_path)).of(key)] == [1, 2, 3]
    assert store.of(key)[1] == TIMING
    assert store.take_notes() == ()


def test_no_folder_keeps_nothing(tmp_path: Path) -> None:
    for none in (config(None), config(tmp_path, cache=CacheConfig(tmp_path, budget_mb=0))):
        KeptTimings(none).keep("a" * 64, TIMING)
        assert KeptTimings(none).of("a" * 64) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[1]", b"null", b"\xff\xfe", b'{"when": 1, "groups": 3}']
)
def test_what_is_damaged_is_dropped_and_told_and_the_rest_is_read(
    tmp_path: Path, damage: bytes
) -> None:
    store, key = KeptTimings(config(tmp_path)), "a" * 64
    store.keep(key, TIMING)
    store.keep(key, replace(TIMING, threads=7))
    first, second = sorted((tmp_path / RATES).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first.write_bytes(damage)
    # As a whole entry whose text is no timing.
    DiskStore(tmp_path, 10**6).write(RATES, key[:32] + "c" * 32, damage)
    assert [one.threads for one in store.of(key)] == [7]
    notes = store.take_notes()
    assert len(notes) == 2
    assert all("damaged" in note and RATES in note for note in notes)
    assert list((tmp_path / RATES).iterdir()) == [second]


def test_no_more_are_kept_than_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "MOST_KEPT", 5)
    store = KeptTimings(config(tmp_path))
    for threads in range(12):
        store.keep("a" * 64, replace(TIMING, threads=threads))
    assert [one.threads for one in store.of("a" * 64)] == [7, 8, 9, 10, 11]


def test_several_runs_keep_theirs_at_once(tmp_path: Path) -> None:
    def keep(number: int) -> None:
        for n in range(10):
            KeptTimings(config(tmp_path)).keep("a" * 64, replace(TIMING, threads=10 * number + n))

    writers = [threading.Thread(target=keep, args=(number,)) for number in range(5)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    store = KeptTimings(config(tmp_path))
    assert {one.threads for one in store.of("a" * 64)} == set(range(50))
    assert store.take_notes() == ()


def test_conditions_tell_apart_what_decides_the_speed() -> None:
    given = [
        config(None),
        config(None, model=ModelChoice(dtype="bfloat16")),
        config(None, model=ModelChoice(quantization="fp8")),
        config(None, batch=BatchConfig(is_invariant=False)),
        config(None, batch=BatchConfig(prewarm=False)),
    ]
    found = [conditions("tiny-image", one) for one in given]
    found.append(conditions("tiny-video", given[0]))
    assert len(set(found)) == len(found)
    alike = config(Path("elsewhere"), batch=BatchConfig(max_size=2))
    assert conditions("tiny-image", alike) == found[0]


def test_an_entry_is_small(tmp_path: Path) -> None:
    KeptTimings(config(tmp_path)).keep("a" * 64, TIMING)
    (entry,) = (tmp_path / RATES).iterdir()
    assert entry.stat().st_size < 1000
    assert json.loads(entry.read_bytes().split(b"\n", 1)[1])["threads"] == 2


@pytest.mark.parametrize(
    ("others", "threads", "cores", "slower"),
    [(0, 1, 2, 1), (1, 1, 2, 1), (2, 1, 2, 1.5), (2, 2, 2, 2), (0, 4, 2, 1), (9, 1, 1, 10)],
)
def test_others_slow_down_what_there_is_no_core_for(
    others: float, threads: int, cores: int, slower: float
) -> None:
    assert slowdown(others, threads, cores) == slower


def test_others_are_what_was_busy_and_not_ours() -> None:
    before = Processors(100.0, 50.0, 5.0)
    assert Processors(110.0, 70.0, 13.0).others_since(before) == pytest.approx(1.2)
    assert Processors(110.0, 51.0, 13.0).others_since(before) == 0
    assert before.others_since(before) == 0


def test_where_no_core_is_left_others_are_those_who_want_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    before = Processors(100.0, 50.0, 5.0, load=6.0)
    assert Processors(110.0, 69.5, 7.0, load=8.0).others_since(before) == pytest.approx(6.8)
    # A minute's average of what is over by now says nothing where cores are idle.
    assert Processors(110.0, 60.0, 7.0, load=8.0).others_since(before) == pytest.approx(0.8)


def test_a_system_that_does_not_tell_is_taken_to_be_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "none")
    monkeypatch.setattr(machine, "_SELF", tmp_path / "none")
    before = Processors.read()
    assert Processors.read().others_since(before) == 0
    assert machine.process_age_s() == 0
