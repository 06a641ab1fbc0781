"""The same command on another machine takes pieces of the run; others are refused."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_replica import wait_for

from hyimg_cli.engine.replicas.joining import SharedWork, find_work
from hyimg_cli.engine.replicas.pieces import cut
from hyimg_cli.engine.replicas.run import Replicas
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal.journal import PREPARING, RunFolder
from hyimg_cli.journal.pieces import BegunJobs, note_death, outcome_of
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice, OutputConfig, ParallelConfig, RunConfig
from hyimg_cli.spec.events import Event, Failure, JobEnded, Outcome, OutputFile, VideoFile
from hyimg_cli.spec.job import ImageJob

FAKE = {"session": "fake_replica:FakeSession", "progress_s": 0.0}


@pytest.fixture
def jobs(job: ImageJob) -> list[ImageJob]:
    named = [replace(job, custom_id=f"j{n}", prompt=f"dog {n}") for n in range(12)]
    return [replace(named[0], prompt="company"), *named[1:]]


def config(out: Path) -> RunConfig:
    choice = ModelChoice(device="cpu")
    return RunConfig(OutputConfig(out), model=choice, parallel=ParallelConfig(replicas=1))


def found(out: Path, jobs: list[ImageJob], settings: RunConfig) -> SharedWork | None:
    folder = RunFolder(out)
    return find_work(folder, jobs, settings, registry.model_card, lambda: folder.is_locked)


def ended(events: list[Event]) -> list[str]:
    return sorted(event.outcome.custom_id for event in events if isinstance(event, JobEnded))


def test_two_commands_share_a_run_and_both_tell_of_every_job(
    tmp_path: Path, jobs: list[ImageJob]
) -> None:
    out, mine = tmp_path / "out", config(tmp_path / "out")
    (tmp_path / "marks").mkdir()
    with RunFolder(out) as folder:
        folder.write_resolved(jobs)
        first = Replicas(mine, setup=FAKE).run(make_plan(jobs, registry.model_card), folder)
        with closing(first):
            told: tuple[list[Event], list[Event]] = [next(first)], []
            work = found(out, jobs, mine)
            assert work is not None
            assert len(work.pieces) > 1, "there is a piece for each"
            # The first job waits until two processes are at work.
            second = Replicas(mine, setup=FAKE)
            second.join(work)
            left = [one for one in work.jobs if work.is_left(one, RunFolder(out).attempts)]
            told[1].extend(second.run(make_plan(left, registry.model_card), RunFolder(out)))
            told[0].extend(first)
    assert ended(told[0]) == ended(told[1]) == sorted(job.custom_id for job in jobs)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(ended(told[0]))
    assert len(list((tmp_path / "marks").glob("*.at-work"))) == 2
    assert not (out / "pieces").exists()


def test_only_the_same_command_joins(tmp_path: Path, jobs: list[ImageJob]) -> None:
    out, mine = tmp_path / "out", config(tmp_path / "out")
    with RunFolder(out) as folder:
        assert found(out, jobs, mine) is None, "a run in one process"
        folder.begin_pieces(PREPARING)
        folder.write_resolved(jobs)
        plan = make_plan(jobs, registry.model_card)
        work = SharedWork(tuple(cut(plan, 2)), {"j1": 3}, {"j2": ["outputs/j2.png"]})
        folder.begin_pieces(work.to_json(folder, mine))
        same = found(out, jobs, mine)
        assert same == work
        assert [same.is_left(one, {"j0": 1, "j1": 3}) for one in jobs[:3]] == [False, True, True]
        others = [replace(jobs[0], seed=8), *jobs[1:]]
        slower = replace(mine, model=replace(mine.model, dtype="bfloat16"))
        for lines, settings in ((others, mine), (jobs[1:], mine), (jobs, slower)):
            with pytest.raises(OutputFolderError, match="of another manifest, model") as refused:
                found(out, lines, settings)
            assert refused.value.code == "output.in-use"
    assert found(out, jobs, mine) is None, "nobody writes there any more"


def test_a_job_is_suspect_only_if_its_process_died_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the whole command was killed, nobody tells how the process died."""
    monkeypatch.setattr("hyimg_cli.journal.pieces._DEATH_NOTE_S", 0.0)
    with RunFolder(tmp_path) as run:
        run.begin_pieces(b"{}")

        def take(process: str, *ended: str) -> BegunJobs:
            with RunFolder(tmp_path, piece=3) as piece:
                found = BegunJobs(piece, process, set(ended))
                for name in "ab":
                    if name not in ended:
                        found.begin(name)
            return found

        assert take("p-1").deaths == {}
        assert take("p-2", "a").deaths == {}, "both were killed with their command"
        note_death(run, "p-2", "replica 0 (killed by signal 9)")
        assert take("p-3", "a").deaths == {"b": ["replica 0 (killed by signal 9)"]}
        note_death(run, "p-3", "replica 1 (it hangs)")
        assert take("p-4", "a", "b").deaths == {"b": ["replica 0 (killed by signal 9)"]}


def test_a_line_is_read_as_the_outcome_that_it_was(tmp_path: Path) -> None:
    file = OutputFile("outputs/a.png", "1", "2", 8, 8, 1)
    video = VideoFile("outputs/b.mp4", "1", "2", 8, 8, 1, 5, 8, "outputs/b.frames")
    outcomes = [
        Outcome("a", "done", "k", outputs=(file,), cot_token_ids=(1, 2), extra={"x_own": [1]}),
        Outcome("b", "done", "k", outputs=(video,), finishing_key="f", edit={"kind": "none"}),
        Outcome("c", "failed", "k", error=Failure("job.fake", "it failed", "", retryable=False)),
    ]
    with RunFolder(tmp_path) as folder:
        for one in outcomes:
            folder.append(one)
        assert [outcome_of(line) for line in folder.results().values()] == outcomes


def test_a_run_waits_for_the_processes_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_manifest: Callable[..., Path]
) -> None:
    monkeypatch.setattr("hyimg_cli.journal.journal._PARTING_S", 0.1)
    with RunFolder(tmp_path) as run:
        run.begin_pieces(b"{}")
    (tmp_path / "pieces").mkdir()
    with RunFolder(tmp_path, piece=0):
        with pytest.raises(OutputFolderError, match="another run is writing"), RunFolder(tmp_path):
            pass
        assert RunFolder(tmp_path).is_locked
    with RunFolder(tmp_path):
        wait_for(lambda: not (tmp_path / "pieces").exists())
