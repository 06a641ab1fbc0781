"""Sessions on real weights: order, failures, kills and phases leave a job's pixels alone."""

import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from event_kinds import is_done, is_step

from hyimg_cli.engine.session import Session
from hyimg_cli.errors import ConsecutiveErrors, Interrupted, JournalError, StorageError
from hyimg_cli.journal.journal import RunFolder, outcome_to_json
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from hyimg_cli.pipelines import clock
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.request import Request
from hyimg_cli.settings.run import BatchConfig, FailurePolicy, OutputConfig, RunConfig
from hyimg_cli.spec.events import PHASES, GroupStarted, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.job import ImageJob, SizeRequest

Write = Callable[..., Path]


def _run(jobs: list[ImageJob], out: Path, **config: Any) -> dict[str, Outcome]:
    settings = RunConfig(OutputConfig(out), **config)
    with RunFolder(out) as folder:
        events = list(Session(settings).run(make_plan(jobs, registry.model_card), folder))
    return {e.outcome.custom_id: e.outcome for e in events if isinstance(e, JobEnded)}


def _pixels(outcome: Outcome) -> str:
    return outcome.outputs[0].pixel_sha256


@pytest.fixture
def jobs(job: ImageJob, sources: tuple[str, ...]) -> list[ImageJob]:
    """Four unlike jobs: text to write, none, an edit, two sources."""
    return [
        replace(job, custom_id="writes", seed=1),
        replace(job, custom_id="plain", seed=2, bot_task="none", size=SizeRequest(64, 64)),
        replace(job, custom_id="edit", seed=3, images=sources[:1], bot_task="recaption"),
        replace(job, custom_id="two", seed=4, images=sources[1:], bot_task="none"),
    ]


def test_an_interrupt_in_the_middle_of_work_keeps_what_is_finished(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ContinuousBatch.events

    def interrupted(batch: ContinuousBatch) -> Iterator[Any]:
        for work, event in events(batch):
            yield work, event
            if isinstance(event, Request):
                raise KeyboardInterrupt

    monkeypatch.setattr(ContinuousBatch, "events", interrupted)
    plain = [replace(jobs[1], custom_id=f"j{n}", num_inference_steps=1) for n in range(2)]
    with pytest.raises(KeyboardInterrupt):
        _run(plain, tmp_path)
    (line,) = RunFolder(tmp_path).results().values()
    assert (tmp_path / line["outputs"][0]["path"]).is_file()


def test_pixels_do_not_depend_on_order_or_company(jobs: list[ImageJob], tmp_path: Path) -> None:
    forward = _run(jobs, tmp_path / "forward")
    backward = _run(jobs[::-1], tmp_path / "backward")
    alone = {}
    for job in jobs:
        alone |= _run([job], tmp_path / job.custom_id)
    for job in jobs:
        name = job.custom_id
        assert _pixels(forward[name]) == _pixels(backward[name]) == _pixels(alone[name])


@pytest.mark.thorough
def test_a_second_job_equals_itself_first_in_a_fresh_process(
    write_manifest: Write, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    lines = [
        {"custom_id": "first", "prompt": "a red circle", "max_new_tokens": 9, "steps": 2},
        {"custom_id": "second", "prompt": "a blue square", "max_new_tokens": 9, "steps": 2},
    ]
    manifest = write_manifest(*lines)
    assert run_cli("generate", manifest, "-o", "all").code == 0
    command = [sys.executable, "-m", "hyimg_cli", "generate", str(manifest), "--select", "second"]
    subprocess.run([*command, "-o", "alone"], cwd=tmp_path, check=True, capture_output=True)
    both, alone = (RunFolder(tmp_path / name).results() for name in ("all", "alone"))
    assert list(both) == ["first", "second"]
    assert list(alone) == ["second"]
    assert len({run["second"]["outputs"][0]["pixel_sha256"] for run in (both, alone)}) == 1


def test_a_failing_neighbour_changes_nothing(jobs: list[ImageJob], tmp_path: Path) -> None:
    clean = _run(jobs, tmp_path / "clean")
    broken = replace(jobs[2], custom_id="broken", images=(str(tmp_path / "missing.png"),))
    mixed = _run([broken, *jobs[:2], replace(broken, custom_id="b2"), *jobs[2:]], tmp_path / "mix")
    assert {name: o.status for name, o in mixed.items()} == {
        "broken": "failed", "b2": "failed", **dict.fromkeys(clean, "done"),
    }  # fmt: skip
    assert mixed["broken"].error is not None
    assert mixed["broken"].error.code == "source.missing"
    assert all(_pixels(mixed[name]) == _pixels(clean[name]) for name in clean)


def test_steps_are_counted_where_they_happen(
    job: ImageJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    velocities = HunyuanImage3.velocities

    def counted(self: Any, pictures: Any) -> Any:
        calls.append(pictures[0].step.timestep)
        return velocities(self, pictures)

    monkeypatch.setattr(HunyuanImage3, "velocities", counted)
    steps = [replace(job, num_inference_steps=7)]
    outcome = _run(steps, tmp_path / "out", batch=BatchConfig(prewarm=False))["job"]
    assert (len(calls), outcome.denoise_steps) == (7, 7)


@pytest.mark.usefixtures("processor_clock")
def test_phases_are_disjoint_and_add_up(jobs: list[ImageJob], tmp_path: Path) -> None:
    for outcome in _run(jobs, tmp_path / "out").values():
        timings = outcome.timings_s
        assert timings.keys() == {*PHASES, "unattributed", "total"}
        parts = sum(seconds for name, seconds in timings.items() if name != "total")
        assert parts == pytest.approx(timings["total"], abs=1e-4)
        assert timings["unattributed"] < 0.05 * timings["total"]
        assert timings["denoise_first"] > 0
        assert timings["denoise_rest"] > 0


def test_what_comes_before_its_group_is_in_no_jobs_time(
    jobs: list[ImageJob], tmp_path: Path
) -> None:
    """Neither loading, nor prewarming, nor groups before."""
    plan = make_plan(jobs, registry.model_card)
    assert len(plan.groups) > 1
    began, most = 0.0, {}
    with RunFolder(tmp_path) as folder, Session(RunConfig(OutputConfig(tmp_path))) as session:
        for event in session.run(plan, folder):
            if isinstance(event, GroupStarted):
                began = time.perf_counter()
            elif is_done(event):
                most[event.outcome.custom_id] = time.perf_counter() - began
                timings = event.outcome.timings_s
                assert timings["queue"] < timings["total"] <= most[event.outcome.custom_id]
    assert len(most) == len(jobs)


def test_shares_add_up_to_no_more_than_the_run_took(jobs: list[ImageJob], tmp_path: Path) -> None:
    began = time.perf_counter()
    outcomes = _run([replace(jobs[n % 2], custom_id=f"j{n}") for n in range(6)], tmp_path / "out")
    took = time.perf_counter() - began
    shares = [one.share_s["total"] for one in outcomes.values()]
    assert 0 < sum(shares) <= took


def test_jobs_that_are_drawn_together_share_the_time(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time that passes only while a step is told: the clocks of a batch are read one after the
    # other, and whatever a busy machine does in between would count.
    now = time.perf_counter()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    plan = make_plan(
        [replace(jobs[n % 2], custom_id=f"j{n}") for n in range(6)], registry.model_card
    )
    outcomes = []
    with RunFolder(tmp_path / "out") as folder:
        for event in Session(RunConfig(OutputConfig(tmp_path / "out"))).run(plan, folder):
            now += is_step(event)
            if isinstance(event, JobEnded):
                outcomes.append(event.outcome)
    assert len(outcomes) == 6
    for one in outcomes:
        # Three were drawn together.
        assert 0 < one.timings_s["denoise_rest"] == pytest.approx(3 * one.share_s["denoise_rest"])
        parts = sum(seconds for name, seconds in one.share_s.items() if name != "total")
        assert 0 < parts == pytest.approx(one.share_s["total"])


def test_a_stop_request_ends_the_run_between_steps(jobs: list[ImageJob], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with RunFolder(out) as folder:
        session = Session(RunConfig(OutputConfig(out)))
        events = session.run(make_plan(jobs, registry.model_card), folder)
        seen = [next(event for event in events if is_step(event))]
        session.request_stop(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            seen.extend(events)
        assert caught.value.exit_code == 143
        assert len(seen) == 1
        assert folder.results() == {}


# The command, which ends itself with SIGKILL at a denoise step behind its second line.
KILLED = """
import os, signal, sys
from hyimg_cli.cli import app
from hyimg_cli.engine.session import Session
from hyimg_cli.spec.events import Progress

told = Session.run

def run(self, plan, folder=None):
    for event in told(self, plan, folder):
        is_step = isinstance(event, Progress) and event.phase == "denoise" and event.done
        if is_step and len(folder.results()) >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield event

Session.run = run
sys.exit(app.run(sys.argv[1:]))
"""


def test_a_killed_run_resumes_to_the_same_pixels(
    write_manifest: Write, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """SIGKILL in the middle, then the same command: nothing done twice, nothing different."""
    lines = [
        {"custom_id": f"job-{n}", "prompt": "a red circle", "bot_task": "none", "steps": 4}
        for n in range(6)
    ]
    manifest = write_manifest(*lines)

    assert run_cli("generate", manifest, "-o", "undisturbed").code == 0
    killed = tmp_path / "killed"
    # Two by two: behind two lines others are in the middle.
    command = ["generate", str(manifest), "-o", str(killed), "--batching-max-size", "2"]
    ran = subprocess.run([sys.executable, "-c", KILLED, *command], check=False, capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    done = set(RunFolder(killed).results())
    assert 2 <= len(done) < 6
    resumed = run_cli(*command, "--json")
    assert resumed.code == 0, resumed.err
    again = {line.get("custom_id") for line in resumed.json_lines} - {None}
    assert again == {line["custom_id"] for line in lines} - done
    expected = RunFolder(tmp_path / "undisturbed").results()
    found = RunFolder(killed).results()
    assert {n: r["outputs"][0]["sha256"] for n, r in found.items()} == {
        n: r["outputs"][0]["sha256"] for n, r in expected.items()
    }


def test_a_picture_that_is_no_picture_fails(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    velocities, decode = HunyuanImage3.velocities, HunyuanImage3.decode_latents
    monkeypatch.setattr(
        HunyuanImage3, "velocities", lambda *a: [v * math.nan for v in velocities(*a)]
    )
    outcome = _run(jobs[1:2], tmp_path / "nan")["plain"]
    assert outcome.error is not None
    assert outcome.error.code == "output-image.not-finite"
    monkeypatch.setattr(HunyuanImage3, "velocities", velocities)
    monkeypatch.setattr(HunyuanImage3, "decode_latents", lambda *a: torch.ones_like(decode(*a)))
    outcome = _run(jobs[1:2], tmp_path / "white")["plain"]
    assert outcome.error is not None
    assert outcome.error.code == "output-image.constant"
    assert not list((tmp_path / "white" / "outputs").iterdir())


def test_a_fault_of_our_own_is_one_failed_job(
    jobs: list[ImageJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    canvas = HunyuanImage3.canvas

    def faulty(self: Any, job: ImageJob, *rest: Any) -> Any:
        if job.custom_id == "plain":
            raise KeyError("a bug")
        return canvas(self, job, *rest)

    monkeypatch.setattr(HunyuanImage3, "canvas", faulty)
    outcomes = _run(jobs[:2], tmp_path / "out")
    assert (outcomes["writes"].status, outcomes["plain"].status) == ("done", "failed")
    assert outcomes["plain"].error is not None
    assert outcomes["plain"].error.code == "job.internal"
    assert "plain" in caplog.text


def test_out_of_memory_is_retried_and_then_fails_the_job(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def full(self: Any, job: ImageJob, *_rest: Any) -> Any:
        tries.append(job.custom_id)
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(HunyuanImage3, "opening", full)
    policy, batch = FailurePolicy(max_retries=2), BatchConfig(prewarm=False)
    outcome = _run(jobs[1:2], tmp_path / "out", failure=policy, batch=batch)["plain"]
    assert len(tries) == 2 * 3, "each attempt once more, with the shared prefixes dropped"
    assert (outcome.status, outcome.attempt) == ("failed", 3)
    assert outcome.error is not None
    assert outcome.error.retryable


def test_fail_fast_stops_at_the_first_failure(jobs: list[ImageJob], tmp_path: Path) -> None:
    broken = replace(jobs[1], custom_id="broken", prompt="<img>")
    outcomes = _run([broken, jobs[1]], tmp_path / "out", failure=FailurePolicy(fail_fast=True))
    assert set(outcomes) == {"broken"}


def _run_to_its_end(jobs: list[ImageJob], out: Path, **failure: Any) -> tuple[dict[str, str], str]:
    """Status of each job that an event tells the end of, and the error that ended the run."""
    config = RunConfig(
        OutputConfig(out), batch=BatchConfig(prewarm=False), failure=FailurePolicy(**failure)
    )
    ended, why = {}, ""
    with RunFolder(out) as folder:
        try:
            for event in Session(config).run(make_plan(jobs, registry.model_card), folder):
                if isinstance(event, JobEnded):
                    ended[event.outcome.custom_id] = event.outcome.status
        except ConsecutiveErrors as error:
            why = f"{error.code}: {error}"
        lines = {name: line["status"] for name, line in folder.results().items()}
    assert ended == lines
    return ended, why


def test_so_many_errors_in_a_row_end_the_run_and_leave_the_rest(
    jobs: list[ImageJob], tmp_path: Path
) -> None:
    broken = [replace(jobs[1], custom_id=f"b{n}", prompt="<img>", seed=n) for n in range(6)]
    ended, why = _run_to_its_end(broken, tmp_path / "out", max_consecutive_errors=4)
    assert list(ended.values()) == ["failed"] * 4
    assert why.startswith(
        "run.consecutive-errors: 4 errors in a row, all of them job.control-token: "
    )
    assert "<img>" in why
    assert "--max-consecutive-errors 0" in why
    ended, why = _run_to_its_end(broken, tmp_path / "on", max_consecutive_errors=0)
    assert (len(ended), why) == (6, "")
    ended, why = _run_to_its_end(broken, tmp_path / "more", max_consecutive_errors=7)
    assert (len(ended), why) == (6, "")


def test_a_success_between_errors_begins_the_count_anew(
    jobs: list[ImageJob], tmp_path: Path
) -> None:
    """Also where it is drawn behind them: they fail as soon as they start."""
    mixed = [
        replace(jobs[1], custom_id=f"{n}", seed=n, prompt="x" if n == 2 else "<img>")
        for n in range(6)
    ]
    ended, why = _run_to_its_end(mixed[:5], tmp_path / "out", max_consecutive_errors=3)
    assert (ended["2"], len(ended), why) == ("done", 5, "")
    ended, why = _run_to_its_end(mixed, tmp_path / "all", max_consecutive_errors=3)
    assert (len(ended), why[:44]) == (5, "run.consecutive-errors: 3 errors in a row, a")


def test_sources_that_cannot_be_read_are_not_counted(jobs: list[ImageJob], tmp_path: Path) -> None:
    gone = [
        replace(jobs[2], custom_id=f"{n}", images=(str(tmp_path / f"{n}.png"),)) for n in range(3)
    ]
    ended, why = _run_to_its_end(gone, tmp_path / "out", max_consecutive_errors=2)
    assert (len(ended), why) == (3, "")


def test_a_full_disk_ends_the_run_with_one_clear_error(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="space"):
            _run(jobs[1:2], tmp_path / "out")
    assert _run(jobs[1:2], tmp_path / "out")["plain"].status == "done"


def test_a_journal_that_is_removed_stops_the_run_and_the_next_one_makes_all(
    jobs: list[ImageJob], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plan = make_plan(jobs, registry.model_card)
    with RunFolder(out) as folder, Session(RunConfig(OutputConfig(out))) as session:
        events = session.run(plan, folder)
        assert any(isinstance(event, JobStarted) for event in events)
        (out / "results.jsonl").unlink()
        with pytest.raises(JournalError):
            list(events)
    assert RunFolder(out).results() == {}
    assert {one.status for one in _run(jobs, out).values()} == {"done"}


def test_lines_hold_what_the_conventions_name(jobs: list[ImageJob], tmp_path: Path) -> None:
    for outcome in _run(jobs[:2], tmp_path / "out").values():
        line = outcome_to_json(outcome)
        assert {
            "custom_id", "status", "outputs", "cot_text", "cot_token_ids", "think_truncated",
            "timings_s", "kv_reuse", "peak_memory_mb", "attempt", "warnings", "error",
        } <= line.keys()  # fmt: skip
        assert line["peak_memory_mb"] > 0
        assert line["kv_reuse"]["branches"][0].keys() == {
            "reused", "shared", "computed", "per_step",
        }  # fmt: skip


def test_what_is_drawn_is_told_before_a_stop(jobs: list[ImageJob], tmp_path: Path) -> None:
    """A stop between two jobs loses no `JobEnded`: as many as lines. Then it may go on."""
    out = tmp_path / "out"
    config = RunConfig(OutputConfig(out), batch=BatchConfig(max_size=1))
    plan = make_plan(jobs, registry.model_card)
    with RunFolder(out) as folder:
        session = Session(config)
        told: list[str] = []
        with pytest.raises(Interrupted):
            told.extend(_told_until_first(session, plan, folder, told))
        assert set(told) == set(folder.results())
        assert 1 <= len(told) < len(jobs)
        events = list(session.run(plan, folder))
        assert sum(is_done(event) for event in events) == len(jobs)


def _told_until_first(session: Session, plan: Any, folder: RunFolder, told: list[str]) -> list[str]:
    for event in session.run(plan, folder):
        if is_done(event):
            told.append(event.outcome.custom_id)
            session.request_stop(signal.SIGINT)
    return []


def test_a_failed_batch_lets_its_activations_go(
    jobs: list[ImageJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the halves are tried, nothing of the whole batch's forward is alive."""
    velocities = HunyuanImage3.velocities
    alive: list[Any] = []

    def small(self: Any, pictures: Any) -> Any:
        if len(pictures) > 1:
            activations = torch.zeros(8)
            alive.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("too many rows")
        assert all(ref() is None for ref in alive)
        return velocities(self, pictures)

    monkeypatch.setattr(HunyuanImage3, "velocities", small)
    plain = [replace(jobs[1], custom_id=f"plain-{n}", seed=n) for n in range(4)]
    outcomes = _run(plain, tmp_path / "out", batch=BatchConfig(prewarm=False))
    assert alive
    assert {outcome.status for outcome in outcomes.values()} == {"done"}
