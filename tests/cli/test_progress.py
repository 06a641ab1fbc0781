"""Progress of many jobs at once: a line for each phase, removed with its last job."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from hyimg_cli.cli import views
from hyimg_cli.cli.render import Style
from hyimg_cli.cli.sentences import describe_outcome, read_text
from hyimg_cli.engine import runner
from hyimg_cli.engine.eta import Eta
from hyimg_cli.engine.run import RunPlanned
from hyimg_cli.settings.run import OutputConfig, RunConfig
from hyimg_cli.spec.events import (
    Event,
    Failure,
    GroupStarted,
    JobEnded,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    Outcome,
    OutputFile,
    Prewarmed,
    Progress,
    ReuseReport,
    VideoFile,
)
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling
from hyimg_cli.spec.plan import Group, Plan
from hyimg_cli.spec.units import time_text

STEPS, JOBS = 4, 40
CONFIG = RunConfig(OutputConfig(Path("out")))
NOTHING = Plan(())


def show(view: views.PlainView, event: Event) -> None:
    """Tell an event as a run does: first what counts, then what shows."""
    view._planned.eta.add(event)
    view._planned.summary.add(event)
    view.show(event)


def planned(
    total: int, plan: Plan = NOTHING, clock: Callable[[], float] = time.monotonic
) -> RunPlanned:
    """So many jobs are left, and these of them need a model."""
    return RunPlanned(plan, runner.Summary(left=total), Eta(plan, CONFIG, clock=clock))


def end_of(name: str, *, is_failed: bool) -> Event:
    if not is_failed:
        return JobEnded(Outcome(name, "done", key=""))
    failure = Failure("job.fake", "told to\nfail", "", retryable=False)
    return JobEnded(Outcome(name, "failed", key="", error=failure))


def life_of(name: str, *, is_failed: bool) -> list[Event]:
    steps = [Progress(name, "denoise", step, STEPS) for step in range(1, STEPS + 1)]
    return [
        JobStarted(name),
        Progress(name, "prefill"),
        Progress(name, "think"),
        Progress(name, "think", 1),
        Progress(name, "think", 2),
        Progress(name, "denoise", 0, STEPS),
        *(steps[:1] if is_failed else steps),
        end_of(name, is_failed=is_failed),
    ]


def interleaved(count: int) -> list[Event]:
    """Every job's events in their order, the jobs in any."""
    lives = [life_of(f"job-{n}", is_failed=n % 5 == 0) for n in range(count)]
    turns = [n for n, life in enumerate(lives) for _ in life]
    random.shuffle(turns)
    return [lives[n].pop(0) for n in turns]


def test_nothing_is_left_over_of_many_interleaved_jobs() -> None:
    view = views.RichView(planned(JOBS))
    with view:
        for event in interleaved(JOBS):
            show(view, event)
            assert len(bars(view)) <= 5
        assert bars(view) == ["all jobs"]


def bars(view: views.RichView) -> list[str]:
    """Descriptions of the bars, from the top."""
    return [task.description for task in view.bars.tasks]


def counts(view: views.RichView) -> list[str]:
    """Texts behind the bars."""
    return [str(task.fields["count"]) for task in view.bars.tasks]


def test_a_phase_is_told_once_with_its_jobs() -> None:
    view = views.RichView(planned(3))
    for name in ("a", "b", "c"):
        show(view, JobStarted(name))
        show(view, Progress(name, "think"))
    show(view, Progress("a", "think", 7))
    show(view, Progress("c", "denoise", 12, 20))
    assert sorted(zip(bars(view)[1:], counts(view)[1:], strict=True)) == [
        ("denoise: c", "step 12/20"),
        ("think: 2 jobs", "7 tokens"),
    ]
    assert view.bars.tasks[0].completed == pytest.approx(0.9 * 0.6)


def test_a_job_that_ends_without_a_start_or_starts_again_leaves_nothing() -> None:
    view = views.RichView(planned(2))
    show(view, end_of("lost", is_failed=True))
    for event in life_of("a", is_failed=False)[:-1] + life_of("a", is_failed=False):
        show(view, event)
    assert bars(view) == ["all jobs"]


@pytest.mark.parametrize("view", [view(planned(2)) for view in (views.PlainView, views.RichView)])
def test_what_was_made_ready_is_told(view: views.View, capsys: pytest.CaptureFixture[str]) -> None:
    view.show(ModelLoading("tiny"))
    assert "loading tiny\n" in capsys.readouterr().err
    view.show(ModelLoaded("tiny", 0.5, "cpu", "float32", 1000))
    view.show(Prewarmed(3, 1.25))
    view.show(Prewarmed(0, 0.5, graphs=12))
    view.show(Prewarmed(2, 0.5, tokens=(512, 7168)))
    err = capsys.readouterr().err
    assert "tiny" in err
    assert "prewarmed 3 shapes in 1.2 s" in err
    assert "prewarmed 0 shapes and 12 CUDA graphs in 0.50 s" in err
    assert "prewarmed 2 shapes with texts of up to 512, 7,168 tokens in 0.50 s" in err


def test_a_failure_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    views.View().show(end_of("a", is_failed=True))
    assert capsys.readouterr().err == "a: failed[job.fake]: told to\\nfail\n"


@pytest.mark.parametrize(
    ("terminal", "kind"), [("dumb", views.PlainView), ("xterm", views.RichView)]
)
def test_a_terminal_without_bars_gets_lines(
    terminal: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    style = Style("auto", is_quiet=False, as_json=False)
    assert type(views.view_of(style, planned(1))) is kind


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pages:
    """Stands for what the system says was read."""

    def __init__(self, **_: object) -> None:
        self.nbytes = 0

    def look(self) -> None:
        self.nbytes += 12_300_000_000


def two_jobs() -> Plan:
    job = ImageJob(
        custom_id="",
        task="t2i",
        prompt="a circle",
        images=(),
        model="tiny-image",
        seed=7,
        size=SizeRequest(),
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        flow_shift=2.0,
        bot_task="think",
        ar_seed=7,
        text=TextSampling(temperature=0.6, top_k=1024, top_p=0.95, max_new_tokens=12),
    )
    return Plan((Group("tiny-image", "auto", tuple(replace(job, custom_id=n) for n in "ab")),))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def plain(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> views.PlainView:
    monkeypatch.setattr(views, "WeightsRead", Pages)
    return views.PlainView(planned(2, two_jobs(), clock), clock=clock)


def test_plain_lines_say_how_far_a_run_is_at_least_every_half_minute(
    plain: views.PlainView, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    show(plain, ModelLoading("tiny-image", 91_400_000_000))
    for _ in range(70):
        clock.now += 1
        plain.tick()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "loading tiny-image"
    assert told[1:] == [
        "loading tiny-image: 91.4 of 91.4 GB, 30 s so far, time left: unknown",
        "loading tiny-image: 91.4 of 91.4 GB, 1 min so far, time left: unknown",
    ]
    show(plain, GroupStarted("tiny-image", "auto"))
    for event in life_of("a", is_failed=False):
        clock.now += 10
        show(plain, event)
    plain.tick()
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("[1/2] a: ")
    (status,) = told[1:]
    assert status.startswith("1 of 2 done, 3 min so far, 1 min 50 s a job, about ")
    assert status.endswith(" left")
    clock.now += 29
    plain.tick()
    assert capsys.readouterr().err == ""


def test_edits_that_need_no_model_count_as_the_run_counts_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not in the plan that `Eta` follows."""
    monkeypatch.setattr(views, "WeightsRead", Pages)
    view = views.PlainView(planned(3, two_jobs(), clock), clock=clock)
    edit = Outcome("edit", "done", key="")
    view._planned.summary.finish(edit)
    view.show(JobEnded(edit))
    show(view, GroupStarted("tiny-image", "auto"))
    show(view, JobStarted("a"))
    clock.now += 40
    view.tick()
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("[1/3] edit: ")
    assert told[1].startswith("1 of 3 done, 40 s so far")


def test_loading_says_how_much_was_read(plain: views.PlainView) -> None:
    assert plain.loading == ""
    show(plain, ModelLoading("tiny-image", 91_400_000_000))
    assert plain.loading == "loading tiny-image"
    plain.tick()
    assert plain.loading == "loading tiny-image: 12.3 of 91.4 GB"
    show(plain, Progress("", "embed", 1, 2))
    assert plain.loading
    show(plain, ModelLoaded("tiny-image", 0.5, "cpu", "float32", 1000))
    assert plain.loading == ""


def test_the_bars_say_rate_elapsed_and_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "WeightsRead", Pages)
    view = views.RichView(planned(2, two_jobs(), clock))
    show(view, ModelLoading("tiny-image", 91_400_000_000))
    view.tick()
    assert bars(view) == ["all jobs", "loading tiny-image"]
    assert counts(view) == ["0/2, 0.0 s so far, time left: unknown", "12.3 of 91.4 GB"]
    show(view, GroupStarted("tiny-image", "auto"))
    for event in life_of("a", is_failed=False):
        clock.now += 10
        show(view, event)
    assert bars(view) == ["all jobs"]
    assert counts(view)[0].startswith("1/2, 1 min 50 s so far, 1 min 50 s a job, about ")
    before = counts(view)[0]
    clock.now += 60
    view.tick()
    assert counts(view)[0] != before


def test_a_view_that_is_open_moves_by_itself_and_stops(
    plain: views.PlainView, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(views, "note", said.put)
    with plain:
        clock.now += 31
        assert said.get(timeout=60) == "0 of 2 done, 31 s so far, time left: unknown"
        assert plain._ticker.is_alive()
    assert not plain._ticker.is_alive()
    assert said.empty()


@pytest.mark.parametrize(
    ("read", "nbytes", "said"),
    [
        (0, 10**9, ""),
        (10**6, 0, ""),
        (3_300_000, 38_700_000, "3.3 of 38.7 MB"),
        (10**12, 91_400_000_000, "91.4 of 91.4 GB"),
    ],
)
def test_loading_in_words(read: int, nbytes: int, said: str) -> None:
    assert read_text(read, nbytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"), (0.36, "0.36 s"), (9.3, "9.3 s"), (9.97, "10 s"), (59.7, "1 min"),
        (250, "4 min 10 s"), (3599.6, "1 h"), (11_520, "3 h 12 min"), (90_000, "25 h"),
    ],
)  # fmt: skip
def test_seconds_in_words(seconds: float, said: str) -> None:
    assert time_text(seconds) == said


def test_notes_are_said_and_a_hit_of_reuse_with_v_alone(caplog: pytest.LogCaptureFixture) -> None:
    picture = OutputFile("outputs/a.png", "", "", 64, 64, 1)
    line = Outcome("a", "done", "key", outputs=(picture,), denoise_steps=9, notes=("turned",))
    hit, part = (
        replace(line, kv_reuse=ReuseReport(status, 0, 0, 0, ())) for status in ("hit", "partial")
    )
    assert describe_outcome(hit) == "a: outputs/a.png in 0.0 s, 9 steps; turned"
    assert describe_outcome(part) == "a: outputs/a.png in 0.0 s, 9 steps, KV reuse partial; turned"
    caplog.set_level(logging.INFO)
    assert describe_outcome(hit) == "a: outputs/a.png in 0.0 s, 9 steps, KV reuse hit; turned"


def test_reuse_is_not_said_of_a_video() -> None:
    reuse = ReuseReport("none", 0, 0, 0, ())
    film = VideoFile("outputs/a.mp4", "", "", 64, 64, 1, num_frames=5, fps=8)
    picture = OutputFile("outputs/a.png", "", "", 64, 64, 1)
    said = [
        describe_outcome(Outcome("a", "done", "key", outputs=(file,), kv_reuse=reuse))
        for file in (film, picture)
    ]
    assert ["KV reuse none" in line for line in said] == [False, True]
