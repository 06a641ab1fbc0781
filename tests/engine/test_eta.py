"""How long a plan takes and a run has left: against a fake clock, by what earlier runs kept."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from event_kinds import is_done

from hyimg_cli.cache.disk import RATES, DiskStore
from hyimg_cli.engine.eta import STAGES, Eta, KeptRates, Rates
from hyimg_cli.settings.run import CacheConfig, JobKind, OutputConfig, RunConfig
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.events import (
    BranchTokens,
    Event,
    Failure,
    GroupStarted,
    JobEnded,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    Outcome,
    Progress,
    ReuseReport,
)
from hyimg_cli.spec.job import ImageJob, Size, VideoJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup

STEPS = 10
LOAD, TOKEN, STEP, FINISH = 60.0, 0.5, 2.0, 1.0
TOKENS = 20
CONFIG = RunConfig(OutputConfig(Path("out")))
VIDEO = VideoJob(
    custom_id="film",
    task="t2v",
    prompt="a ball",
    model="tiny-video",
    seed=1,
    size=Size(32, 32),
    num_frames=5,
    fps=8,
    num_inference_steps=4,
    guidance_scale=1.0,
    flow_shift=5.0,
)
VIDEOS = VideoGroup("tiny-video", "32x32, 5 frames", (VIDEO,))


def done(name: str, tokens: int = TOKENS) -> JobEnded:
    reuse = ReuseReport("hit", 30, 5, tokens, (BranchTokens(10, 0, 4, 16),))
    return JobEnded(Outcome(name, "done", key="", kv_reuse=reuse))


class Run:
    """A run of `count` jobs, so many together, whose every moment is known."""

    def __init__(self, job: ImageJob, count: int, together: int, tokens: int = TOKENS) -> None:
        self.now = 0.0
        text = replace(job.text, max_new_tokens=500)
        one = replace(job, num_inference_steps=STEPS, text=text)
        self.jobs = tuple(replace(one, custom_id=f"j{n}", ar_seed=n) for n in range(count))
        self.plan = Plan((Group("tiny-image", "auto", self.jobs),))
        self.together, self.tokens = together, tokens

    def moments(self) -> list[tuple[float, Event]]:
        """Every event with the seconds that pass before it."""
        found: list[tuple[float, Event]] = [
            (0, ModelLoading("tiny-image")),
            (LOAD, ModelLoaded("tiny-image", LOAD, "cpu", "float32", 1)),
            (0, GroupStarted("tiny-image", "auto")),
        ]
        for first in range(0, len(self.jobs), self.together):
            names = [job.custom_id for job in self.jobs[first : first + self.together]]
            for name in names:
                found += [(0, JobStarted(name)), (0, Progress(name, "think"))]
            for token in range(1, self.tokens + 1):
                found += [
                    (TOKEN if n == 0 else 0, Progress(name, "think", token))
                    for n, name in enumerate(names)
                ]
            found += [(0, Progress(name, "denoise", 0, STEPS)) for name in names]
            for step in range(1, STEPS + 1):
                found += [
                    (STEP if n == 0 else 0, Progress(name, "denoise", step, STEPS))
                    for n, name in enumerate(names)
                ]
            found += [(FINISH, done(name, self.tokens)) for name in names]
        return found

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.moments())

    def eta(self, earlier: Sequence[Rates] = ()) -> Eta:
        return Eta(self.plan, CONFIG, {"tiny-image": earlier}, clock=lambda: self.now)

    def rates(self) -> Rates:
        """What is kept of the whole run."""
        eta = self.eta()
        for seconds, event in self.moments():
            self.now += seconds
            eta.add(event)
        rates, self.now = eta.rates()["tiny-image"], 0.0
        return rates


def slower(rates: Rates, factor: float) -> Rates:
    return {name: rate * (factor if name in STAGES else 1) for name, rate in rates.items()}


@pytest.fixture(params=[(40, 1), (40, 8), (8, 8)])
def run(request: pytest.FixtureRequest, job: ImageJob) -> Run:
    return Run(job, *request.param)


def test_without_earlier_runs_it_is_unknown_until_every_stage_was_seen(run: Run) -> None:
    left, moments = run.eta(), run.moments()
    total = run.seconds
    has_finished = False
    for seconds, event in moments:
        run.now += seconds
        left.add(event)
        if left.left_s is None:
            assert not has_finished
        elif 0.5 * total < run.now:
            assert left.left_s == pytest.approx(total - run.now, rel=0.25, abs=3 * STEP)
        has_finished = has_finished or is_done(event)
    assert left.left_s == 0


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_with_earlier_runs_it_is_known_from_the_start_and_learns(run: Run, factor: float) -> None:
    left, moments = run.eta([slower(run.rates(), factor)]), run.moments()
    total = run.seconds
    for number, (seconds, event) in enumerate(moments):
        run.now += seconds
        left.add(event)
        assert left.left_s is not None
        # Events of one moment come one after the other: the last of them counts.
        if number + 1 == len(moments) or moments[number + 1][0]:
            wrong = factor - 1 if run.now < 0.5 * total else 0.5 * (factor - 1)
            most = 5 * STEP + LOAD * (factor - 1)
            assert left.left_s == pytest.approx(total - run.now, rel=0.15 + wrong, abs=most)


def test_between_events_it_counts_down_until_nobody_can_know(job: ImageJob) -> None:
    run = Run(job, 4, 1)
    left = run.eta([run.rates()])
    left.add(ModelLoading("tiny-image"))
    before = left.left_s
    run.now += 20
    now = left.left_s
    assert before is not None
    assert now == pytest.approx(before - 20)
    run.now += before - 20
    assert left.left_s == pytest.approx(before - LOAD), "all jobs are still awaited"
    run.now += 10_000
    assert left.left_s is None, "it takes longer than all of it should"


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("stalls_at", [is_done, lambda event: isinstance(event, Progress)])
def test_a_step_that_stalls_does_no_later_work(
    job: ImageJob, together: int, stalls_at: Callable[[Event], bool]
) -> None:
    """A store that answers late, for one: the time is lost, and the same work is left."""
    run = Run(job, 8, together)
    left, moments = run.eta([run.rates()]), run.moments()
    for place, (seconds, event) in enumerate(moments):
        run.now += seconds
        left.add(event)
        # In the middle of the run.
        if place > len(moments) // 2 and stalls_at(event):
            break
    before = left.left_s
    assert before is not None
    run.now += before
    assert left.left_s is not None
    assert left.left_s >= before - max(STEP, TOKEN, FINISH)
    run.now += 1000
    assert left.left_s is None


def test_a_failed_job_leaves_no_work_and_one_tried_again_has_all_of_it(job: ImageJob) -> None:
    run = Run(job, 2, 1)
    left = run.eta([run.rates()])
    for event in (JobStarted("j0"), Progress("j0", "denoise", 5, STEPS)):
        left.add(event)
    half = left.left_s
    left.add(JobStarted("j0"))
    again = left.left_s
    failure = Failure("job.fake", "", "", retryable=False)
    left.add(JobEnded(Outcome("j0", "failed", key="", error=failure)))
    assert half is not None
    assert again is not None
    assert left.left_s is not None
    assert left.left_s < half < again


def test_events_of_nobody_and_in_any_order_do_no_harm(job: ImageJob) -> None:
    run = Run(job, 5, 1)
    events = [event for _, event in run.moments()] * 2
    events += [
        JobStarted("nobody"),
        Progress("nobody", "think", 3),
        Progress("nobody", "denoise", 1, 2),
    ]
    random.shuffle(events)
    left = run.eta()
    for event in events:
        run.now += 0.1
        left.add(event)
        assert left.left_s is None or left.left_s >= 0


def test_a_plan_without_jobs_has_nothing_left() -> None:
    left = Eta(Plan(()), CONFIG)
    assert left.left_s == 0


def test_a_plan_takes_what_runs_of_other_lengths_took_by_unit(job: ImageJob) -> None:
    """The median of three runs: one that was disturbed does not count."""
    kept = Run(job, 4, 1).rates()
    long = Run(job, 40, 1)
    eta = long.eta([kept, slower(kept, 9.0), kept])
    assert eta.left_s == pytest.approx(long.seconds)
    assert eta.stages_s == pytest.approx(
        {
            "load": LOAD,
            "prompts": 0,
            "pictures": 0,
            "text": 40 * TOKENS * TOKEN,
            "denoise": 40 * STEPS * STEP,
            "decode": 40 * FINISH,
        }
    )
    assert (eta.runs, eta.unknown) == (3, ())


def test_twice_the_steps_pixels_and_branches_take_twice_as_long(job: ImageJob) -> None:
    kept = Run(replace(job, guidance_scale=1.0), 4, 1).rates()
    plain, more = (
        Eta(Plan((Group("tiny-image", "auto", (one,)),)), CONFIG, {"tiny-image": [kept]}).stages_s
        for one in (
            replace(job, num_inference_steps=STEPS, guidance_scale=1.0),
            replace(job, num_inference_steps=2 * STEPS, guidance_scale=4.0),
        )
    )
    assert more["denoise"] == pytest.approx(4 * plain["denoise"])
    assert more["decode"] == plain["decode"]
    film = replace(VIDEO, num_frames=9, num_inference_steps=8)
    rates: Rates = dict.fromkeys(STAGES, 1.0)
    short, longer = (
        Eta(Plan((replace(VIDEOS, jobs=(one,)),)), CONFIG, {"tiny-video": [rates]}).stages_s
        for one in (VIDEO, film)
    )
    assert longer["denoise"] >= 2 * short["denoise"]
    assert longer["decode"] == pytest.approx(9 / 5 * short["decode"])


def test_texts_are_as_long_as_those_of_their_kind_and_no_longer_than_they_may_be(
    job: ImageJob,
) -> None:
    kept = Run(replace(job, bot_task="think"), 4, 1, tokens=30).rates()
    kept = {**kept, "recaption": 7.0}

    def text_s(*jobs: ImageJob) -> float:
        plan = Plan((Group("tiny-image", "auto", jobs),))
        return Eta(plan, CONFIG, {"tiny-image": [kept]}).stages_s["text"]

    one = replace(job, bot_task="think", text=replace(job.text, max_new_tokens=500))
    assert text_s(one) == pytest.approx(30 * TOKEN)
    assert text_s(replace(one, bot_task="recaption")) == pytest.approx(7 * TOKEN)
    assert text_s(replace(one, text=replace(one.text, max_new_tokens=10))) == 10 * TOKEN
    assert text_s(replace(one, bot_task="none")) == 0
    again = replace(one, custom_id="again", seed=99)
    assert text_s(one, again) == text_s(one), "one text, two pictures"


def test_a_model_without_runs_makes_the_time_unknown(job: ImageJob) -> None:
    run = Run(job, 2, 1)
    plan = Plan((*run.plan.groups, replace(VIDEOS, jobs=(VIDEO,))))
    eta = Eta(plan, CONFIG, {"tiny-image": [run.rates()]})
    assert (eta.left_s, eta.unknown, eta.runs) == (None, ("tiny-video",), 0)
    rates: Rates = dict.fromkeys(STAGES, 1.0)
    assert Eta(plan, CONFIG, {"tiny-image": [rates], "tiny-video": [rates]}).stages_s["load"] == 2
    silent = {name: rate for name, rate in rates.items() if name != "text"}
    assert Eta(plan, CONFIG, {"tiny-image": [silent], "tiny-video": [rates]}).unknown == (
        "tiny-image",
    )


def test_what_failed_leaves_no_rates(job: ImageJob) -> None:
    run = Run(job, 2, 1)
    eta = run.eta()
    eta.add(GroupStarted("tiny-image", "auto"))
    assert eta.rates() == {}
    failure = Failure("job.fake", "", "", retryable=False)
    eta.add(JobStarted("j0"))
    run.now += 50
    eta.add(JobEnded(Outcome("j0", "failed", key="", error=failure)))
    assert eta.rates() == {}
    for seconds, event in run.moments():
        if "'j1'" in str(event):
            run.now += seconds
            eta.add(event)
    assert eta.rates()["tiny-image"]["denoise"] == pytest.approx(run.rates()["denoise"])


def test_until_it_is_kept_a_run_goes_on_loading_or_ending(job: ImageJob) -> None:
    run = Run(job, 2, 1)
    eta = Eta(run.plan, CONFIG, age_s=5.0, clock=lambda: run.now)
    for seconds, event in run.moments():
        run.now += seconds
        eta.add(event)
    assert eta.elapsed_s == 5 + run.seconds
    run.now += 3
    assert eta.rates()["tiny-image"]["load"] == 5 + LOAD + 3


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return replace(CONFIG, cache=CacheConfig(tmp_path))


@pytest.fixture
def plan(job: ImageJob) -> Plan:
    return Plan((Group("tiny-image", "auto", (job,)), replace(VIDEOS, jobs=(VIDEO,))))


def kept(config: RunConfig, plan: Plan) -> dict[str, list[float]]:
    found = KeptRates(config).read(plan)
    return {model: [rates["load"] for rates in runs] for model, runs in found.items()}


def test_the_newest_runs_come_back_as_they_were_kept(config: RunConfig, plan: Plan) -> None:
    assert kept(config, plan) == {"tiny-image": [], "tiny-video": []}
    for seconds in range(12):
        KeptRates(config).keep(plan, {"tiny-image": {"load": seconds, "think": 0.5}})
    KeptRates(config).keep(plan, {"tiny-video": {"load": 7}})
    assert kept(config, plan) == {"tiny-image": [*range(3, 12)], "tiny-video": [7]}
    assert KeptRates(config).read(plan)["tiny-image"][0] == {"load": 3, "think": 0.5}
    entries = DiskStore(config.cache.folder, 10**6).entries()
    assert [entry.nbytes < 1000 for entry in entries] == [True, True]


def test_no_folder_keeps_nothing(tmp_path: Path, plan: Plan) -> None:
    for cache in (CacheConfig(None), CacheConfig(tmp_path, budget_mb=0)):
        none = replace(CONFIG, cache=cache)
        KeptRates(none).keep(plan, {"tiny-image": {"load": 1.0}})
        assert kept(none, plan)["tiny-image"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b'[{"load": "long"}]'])
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_damaged_is_dropped_and_told(
    tmp_path: Path, config: RunConfig, plan: Plan, damage: bytes, is_whole: bool
) -> None:
    KeptRates(config).keep(plan, {"tiny-image": {"load": 1.0}})
    (entry,) = (tmp_path / RATES).iterdir()
    if is_whole:
        DiskStore(tmp_path, 10**6).write(RATES, entry.name, damage)
    else:
        entry.write_bytes(damage)
    store = KeptRates(config)
    assert store.read(plan)["tiny-image"] == []
    (note,) = store.take_notes()
    assert "damaged" in note
    assert RATES in note
    store.keep(plan, {"tiny-image": {"load": 2.0}})
    assert kept(config, plan)["tiny-image"] == [2.0]


# A checkpoint counts by its fingerprint; what becomes of failures takes no time of a unit.
KINDS: dict[str, JobKind] = {"tiny-image": "pictures", "tiny-video": "videos"}
_COUNTS = [
    n
    for n, row in SETTINGS.items()
    if not (row.in_line or row.pixels == "checkpoint" or row.attribute == "folder")
]


@pytest.mark.parametrize("name", _COUNTS)
def test_runs_with_another_setting_are_not_alike(name: str, config: RunConfig, plan: Plan) -> None:
    row = SETTINGS[name]
    part, field = row.table, row.attribute
    other = {"dtype": "bfloat16", "device": "cuda", "disk_cache_mb": 7}.get(name, "other")
    changed = replace(config, **{part: replace(getattr(config, part), **{field: other})})
    KeptRates(config).keep(plan, {model: {"load": 1.0} for model in ("tiny-image", "tiny-video")})
    reads = {kind: row.concerns(kind, denoises_latents=True) for kind in KINDS.values()}
    assert kept(changed, plan) == {
        model: [] if reads[kind] and part != "failure" else [1.0] for model, kind in KINDS.items()
    }


def test_auto_is_what_it_stands_for(config: RunConfig, plan: Plan) -> None:
    KeptRates(config).keep(plan, {"tiny-image": {"load": 1.0}})
    there = replace(config.model, dtype="float32", device="cpu")
    assert kept(replace(config, model=there), plan)["tiny-image"] == [1.0]


def test_weights_that_are_not_here_have_no_runs(
    config: RunConfig, plan: Plan, tmp_path: Path
) -> None:
    group = plan.groups[0]
    assert isinstance(group, Group)
    elsewhere = Plan((replace(group, model=str(tmp_path / "none")),))
    KeptRates(config).keep(elsewhere, {str(tmp_path / "none"): {"load": 1.0}})
    assert kept(config, elsewhere) == {str(tmp_path / "none"): []}
