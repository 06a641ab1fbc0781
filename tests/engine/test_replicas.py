"""Replicas as processes without torch: shares of work, and what is left after a kill."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine.fake_video import video_job
from event_kinds import is_done, is_step
from fake_replica import WAIT_S, wait_for
from machines import with_main_memory

from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.replicas.messages import Launcher, Setup
from hyimg_cli.engine.replicas.run import Replicas
from hyimg_cli.errors import (
    CheckpointError,
    ConsecutiveErrors,
    Interrupted,
    JournalError,
    MachineError,
    StorageError,
)
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import pixel_settings
from hyimg_cli.journal.resume import ResumePolicy, resume
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import replica_config
from hyimg_cli.models import registry
from hyimg_cli.parallel.watch import LIMITS, Limits
from hyimg_cli.settings.run import (
    BatchConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)
from hyimg_cli.spec.events import Event, JobEnded, ModelLoaded, Outcome, ReplicaDied
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Plan


@dataclass
class Floor:
    """Where replicas without torch are started, and what became of them."""

    out: Path
    marks: Path
    environment: dict[int, dict[str, str]] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    limits: Limits = LIMITS
    beat_s: float = 10.0
    ray_address: str | None = None

    def launcher(self, config: RunConfig, plan: Plan, count: int) -> Launcher:
        """The one that the run would take, with an environment of each replica's own."""
        floor, known = self, LocalProcesses
        if self.ray_address is not None:
            from hyimg_cli.engine.replicas.cluster import RayCluster as known  # type: ignore

        class Watched(known):
            def start(self, setup: Setup) -> None:
                floor.started.append(setup.number)
                super().start(setup)

            def environment(self, number: int) -> dict[str, str]:
                return super().environment(number) | floor.environment.get(number, {})

            def options(self, number: int) -> dict[str, Any]:
                own = floor.environment.get(number)
                return {"runtime_env": {"env_vars": own}} if own else {}

        return Watched(config, plan, count)

    def replicas(self, config: RunConfig) -> Replicas:
        setup = {"session": "fake_replica:FakeSession", "beat_s": self.beat_s, "progress_s": 0.0}
        return Replicas(config, launcher=self.launcher, limits=self.limits, setup=setup)

    def config(self, count: int, **failure: Any) -> RunConfig:
        return RunConfig(
            OutputConfig(self.out),
            model=ModelChoice(device="cpu"),
            parallel=ParallelConfig(replicas=count, ray_address=self.ray_address),
            failure=FailurePolicy(**failure),
        )

    def run(
        self,
        jobs: Sequence[Job],
        count: int = 2,
        *,
        each: Callable[[Event, Replicas], None] = lambda *_: None,
        **failure: Any,
    ) -> list[Event]:
        """The events of what is left to do of the jobs; `each` sees them one by one."""
        config, events = self.config(count, **failure), []
        with RunFolder(self.out) as folder:
            rest = resume(folder, jobs, config, ResumePolicy())
            several = self.replicas(config)
            with closing(several), closing(several.run(self.plan(rest.to_run), folder)) as told:
                for event in told:
                    events.append(event)
                    each(event, several)
        return events

    def hold(self, jobs: int | None) -> None:
        """Have each replica that starts from now on wait behind so many jobs, until it is stopped;
        None: no more.
        """
        mark = self.marks / "holds"
        mark.unlink(missing_ok=True)
        if jobs is not None:
            mark.write_text(str(jobs))

    def plan(self, jobs: Sequence[Job]) -> Plan:
        return make_plan(jobs, registry.model_card)

    @property
    def death(self) -> str:
        """Why a replica is gone that was killed, in the words of who carries its messages."""
        return "its process or machine is gone" if self.ray_address else "killed by signal 9"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The journal, every line."""
        text = "".join(path.read_text() for path in RunFolder(self.out).journals())
        return [json.loads(line) for line in text.splitlines()]

    @property
    def pictures(self) -> list[str]:
        return sorted(path.stem for path in (self.out / "outputs").glob("*.png"))

    @property
    def leftovers(self) -> list[str]:
        hidden = [
            *(self.out / "outputs").glob(".*"),
            *self.out.glob(".*"),
            *self.out.glob("pieces*"),
        ]
        return [path.name for path in hidden if path.name != ".lock"]

    @property
    def pids(self) -> list[int]:
        return [int(path.stem) for path in self.marks.glob("*.pid")]

    def assert_all_gone(self) -> None:
        wait_for(lambda: not any(map(is_alive, self.pids)))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


RAY = pytest.mark.ray
AT_LENGTH = [RAY, pytest.mark.thorough]


@pytest.fixture(params=["local", pytest.param("ray", marks=AT_LENGTH)])
def floor(request: pytest.FixtureRequest, tmp_path: Path) -> Floor:
    """Processes of this machine, and at length actors of a cluster of two."""
    (tmp_path / "marks").mkdir()
    found = Floor(tmp_path / "out", tmp_path / "marks")
    if request.param == "ray":
        found.ray_address = request.getfixturevalue("ray_cluster")
    return found


# For what make test tries on a cluster, too.
on_processes = pytest.mark.parametrize("floor", ["local"], indirect=True)
on_both = pytest.mark.parametrize("floor", ["local", pytest.param("ray", marks=RAY)], indirect=True)


@pytest.fixture
def some(job: ImageJob) -> Callable[..., list[ImageJob]]:
    """Jobs `j0`, `j1`, … with what each is told to do."""

    def make(count: int, **told: str) -> list[ImageJob]:
        names = [f"j{n}" for n in range(count)]
        return [replace(job, custom_id=n, prompt=told.get(n, "a dog")) for n in names]

    return make


Some = Callable[..., list[ImageJob]]


def outcomes(events: list[Event]) -> dict[str, Outcome]:
    ended = [event.outcome for event in events if isinstance(event, JobEnded)]
    assert len({outcome.custom_id for outcome in ended}) == len(ended), "a job ends once"
    return {outcome.custom_id: outcome for outcome in ended}


def deaths(events: list[Event]) -> list[ReplicaDied]:
    return [event for event in events if isinstance(event, ReplicaDied)]


@on_both
def test_all_is_done_once_and_the_line_stands_before_it_is_told(floor: Floor, some: Some) -> None:

    def is_recorded(event: Event, _: Replicas) -> None:
        if is_done(event):
            last = floor.lines
            assert event.outcome.custom_id in [line["custom_id"] for line in last]
            assert (floor.out / event.outcome.outputs[0].path).is_file()

    jobs = some(21, j0="company")
    found = outcomes(floor.run(jobs[:20], each=is_recorded))
    assert sorted(found) == sorted(job.custom_id for job in jobs[:20])
    assert Counter(line["custom_id"] for line in floor.lines) == Counter(list(found))
    assert {line["replica"] for line in floor.lines} == {0, 1}
    assert {line["custom_id"]: line["replica"] for line in floor.lines} == {
        name: outcome.replica for name, outcome in found.items()
    }
    assert all(outcome.attempt == 1 for outcome in found.values())
    assert floor.pictures == sorted(found)
    floor.assert_all_gone()
    assert outcomes(floor.run(jobs)).keys() == {"j20"}, "the others are done"


def test_no_more_processes_than_jobs(floor: Floor, some: Some) -> None:
    events = floor.run(some(2), 5)
    assert len(floor.started) == 2
    assert sorted(outcomes(events)) == ["j0", "j1"]
    assert floor.run([], 5) == []
    assert len(floor.started) == 2


def test_the_slow_one_gets_less(floor: Floor, some: Some) -> None:
    floor.environment = {0: {"LAST": "26"}}
    found = outcomes(floor.run(some(40, j0="company")))
    done = Counter(outcome.replica for outcome in found.values())
    assert done[0] + done[1] == 40
    assert 0 < done[0] < 15


@on_both
def test_a_killed_replica_costs_no_job(floor: Floor, some: Some) -> None:
    events = floor.run(some(30, j3="die once"))
    found = outcomes(events)
    assert len(found) == 30
    assert all(outcome.status == "done" for outcome in found.values())
    (death,) = deaths(events)
    assert death.why == floor.death
    assert (death.jobs, death.starts_again) == (1, True)
    assert len(floor.started) == 3
    (warning,) = found["j3"].warnings
    assert "died while running this job" in warning
    assert [name for name, outcome in found.items() if outcome.warnings] == ["j3"]
    assert floor.leftovers == []
    assert Counter(line["custom_id"] for line in floor.lines) == Counter(list(found))


def test_a_job_that_kills_twice_fails_and_the_rest_is_done(floor: Floor, some: Some) -> None:
    events = floor.run(some(12, j2="die", j7="fail"))
    found = outcomes(events)
    assert len(found) == 12
    failed = {name: outcome.error for name, outcome in found.items() if outcome.error}
    assert sorted(failed) == ["j2", "j7"]
    assert failed["j2"] is not None
    assert (failed["j2"].code, failed["j2"].retryable) == ("replica.died", True)
    assert floor.death in failed["j2"].message
    assert len(deaths(events)) == 2
    assert [line["status"] for line in floor.lines if line["custom_id"] == "j2"] == ["failed"]
    floor.assert_all_gone()


def test_jobs_in_flight_beside_the_guilty_one_are_not_blamed(floor: Floor, some: Some) -> None:
    """Of the dead replica's piece only what it had begun is suspect."""
    found = outcomes(floor.run(some(16, j0="die")))
    assert [name for name, outcome in found.items() if outcome.status == "failed"] == ["j0"]
    assert not any(outcome.warnings for name, outcome in found.items() if name != "j0")


def test_all_dead_is_a_machine_error_and_resumable(floor: Floor, some: Some) -> None:
    floor.environment = {0: {"DIES": "1"}, 1: {"DIES": "1"}}
    events: list[Event] = []
    with pytest.raises(MachineError, match=f"died: .*{floor.death}.*{floor.death}") as raised:
        floor.run(some(6), each=lambda event, _: events.append(event))
    assert raised.value.code == "machine.replicas"
    assert Counter(floor.started) == {0: 3, 1: 3}, "what dies without a job dies again"
    assert Counter(death.starts_again for death in deaths(events)) == {True: 4, False: 2}
    floor.assert_all_gone()
    floor.environment = {}
    assert len(outcomes(floor.run(some(6)))) == 6


def test_one_that_never_comes_up_leaves_the_work_to_the_others(floor: Floor, some: Some) -> None:
    floor.environment = {1: {"DIES": "1"}}
    events = floor.run(some(10, j0="company"))
    assert {outcome.replica for outcome in outcomes(events).values()} == {0}
    assert {death.replica for death in deaths(events)} == {1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_what_is_made_and_no_process(
    floor: Floor, some: Some, number: signal.Signals
) -> None:
    floor.hold(1)
    steps: list[int] = []

    def stop(event: Event, several: Replicas) -> None:
        if is_step(event):
            steps.append(event.done)
        elif is_done(event):
            steps.append(0)
            if steps.count(0) == 2:
                # As a signal's handler would, while `run` waits for the replicas.
                wait_for(lambda: len(list(floor.marks.glob("*.held"))) == 2)
                threading.Timer(0.01, several.request_stop, [number]).start()

    with pytest.raises(Interrupted) as raised:
        floor.run(some(40), each=stop)
    assert raised.value.exit_code == 128 + number
    shown = [0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert sorted(steps) == shown, "each stops behind the step it was at"
    assert floor.pictures == sorted(line["custom_id"] for line in floor.lines)
    floor.assert_all_gone()
    assert len(floor.lines) == 2
    floor.hold(None)
    assert len(outcomes(floor.run(some(40)))) == 38


def test_a_stop_before_any_replica_is_up_is_answered_at_once(floor: Floor, some: Some) -> None:
    config = floor.config(2)
    several = floor.replicas(config)
    threading.Timer(0.05, several.request_stop, [signal.SIGINT]).start()
    began = time.monotonic()
    with RunFolder(floor.out) as folder, pytest.raises(Interrupted):
        list(several.run(floor.plan(some(4, j0="hang", j1="hang")), folder))
    assert time.monotonic() - began < WAIT_S
    floor.assert_all_gone()


def test_whoever_stops_listening_leaves_no_process(floor: Floor, some: Some) -> None:
    several = floor.replicas(floor.config(2))
    with RunFolder(floor.out) as folder:
        told = several.run(floor.plan(some(30)), folder)
        while not is_done(next(told)):
            pass
        told.close()
        assert floor.pictures == sorted(line["custom_id"] for line in floor.lines)
    floor.assert_all_gone()


def test_a_fault_of_the_checkpoint_ends_the_run(floor: Floor, some: Some) -> None:
    with pytest.raises(CheckpointError, match="there is none") as raised:
        floor.run(some(20, j1="no checkpoint"))
    assert raised.value.hint == "copy it"
    assert floor.pictures == sorted(line["custom_id"] for line in floor.lines)
    floor.assert_all_gone()


def test_a_folder_in_the_way_of_a_file_fails_its_job_alone(floor: Floor, some: Some) -> None:
    jobs = some(3)
    precious = floor.out / "outputs" / f"{jobs[1].custom_id}.png" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    ended = outcomes(floor.run(jobs))
    assert [ended[job.custom_id].status for job in jobs] == ["done", "failed", "done"]
    error = ended[jobs[1].custom_id].error
    assert error is not None
    assert error.code == "job.folder-in-the-way"
    assert precious.exists()
    assert {line["custom_id"]: line["status"] for line in floor.lines} == {
        name: outcome.status for name, outcome in ended.items()
    }


@pytest.mark.parametrize("fault", ["gpu", "crash"])
def test_a_fault_of_one_replica_does_not_end_the_run(
    floor: Floor, some: Some, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = floor.run(some(10, j1=fault))
    failed = [one for one in outcomes(events).values() if one.status == "failed"]
    assert [one.custom_id for one in failed] == ["j1"]
    assert len(outcomes(events)) == 10
    reason = "the GPU failed" if fault == "gpu" else "RuntimeError: a mistake of ours"
    assert {death.why for death in deaths(events)} == {reason}
    assert ("Traceback" in caplog.text) == (fault == "crash")


def test_fail_fast_stops_every_replica(floor: Floor, some: Some) -> None:
    floor.hold(1)
    found = outcomes(floor.run(some(40, j0="fail"), fail_fast=True))
    assert found["j0"].status == "failed"
    assert len(found) <= 2, "what the other has done by then"
    assert floor.pictures == sorted(n for n, one in found.items() if one.status == "done")
    floor.assert_all_gone()


def test_errors_in_a_row_stop_every_replica(floor: Floor, some: Some) -> None:
    jobs = some(40, **{f"j{n}": "fail" for n in range(1, 40)})
    with pytest.raises(ConsecutiveErrors, match=r"all of them job\.fake: it was told to fail"):
        floor.run(jobs, max_consecutive_errors=5)
    failed = [line for line in floor.lines if line["status"] == "failed"]
    assert 5 <= len(failed) < 30
    floor.assert_all_gone()
    left = 40 - len(floor.lines)
    assert len(outcomes(floor.run(jobs, max_consecutive_errors=0))) == left


def test_one_that_is_stopped_is_ended_and_its_jobs_are_done(floor: Floor, some: Some) -> None:
    floor.limits, floor.beat_s = Limits(silence_s=3.0), 0.2
    events = floor.run(some(6, j0="stop"))
    # On a machine that is busy enough another one may be silent for as long.
    assert {death.why for death in deaths(events)} == {"no sign of life for 3 s"}
    assert {one.status for one in outcomes(events).values()} == {"done"}
    assert len(outcomes(events)) == 6
    floor.assert_all_gone()


def test_one_that_is_stopped_before_its_first_word_is_ended_as_soon(
    floor: Floor, some: Some
) -> None:
    """Its interpreter has started, and nothing else."""
    floor.limits, floor.beat_s = Limits(start_s=8.0 if floor.ray_address else 3.0), 0.2
    mark = floor.marks / "stop at start"
    mark.touch()
    floor.environment = {0: stopped_at_start(mark)}
    events = floor.run(some(6), 1)
    assert {death.why for death in deaths(events)} == {
        f"no sign of life for {floor.limits.start_s:.0f} s"
    }
    assert len(outcomes(events)) == 6
    assert not mark.exists()
    floor.assert_all_gone()


def stopped_at_start(mark: Path) -> dict[str, str]:
    """An environment in which Python stops as it starts, once."""
    tests = Path(__file__).parents[1]
    path = [str(tests / "stopped_at_start"), str(tests), str(tests.parent)]
    return {"PYTHONPATH": os.pathsep.join(path), "STOP_AT_START": str(mark)}


def test_one_that_hangs_is_ended_by_its_own_beat(floor: Floor, some: Some) -> None:
    floor.limits = Limits(first_s=1.5, step_s=1.0)
    floor.beat_s = 0.2
    events = floor.run(some(6, j0="hang"))
    hung = r"no progress for \d+ s \(.* of .*\); it hangs"
    assert all(re.fullmatch(hung, death.why) for death in deaths(events))
    assert any("(job of" in death.why for death in deaths(events))
    assert {one.status for one in outcomes(events).values()} == {"done"}
    assert len(outcomes(events)) == 6
    floor.assert_all_gone()


def test_latents_of_a_film_travel_to_who_goes_on_with_it(floor: Floor) -> None:
    films = [video_job(f"f{n}", prompt="a dog", seed=1, source_line="") for n in range(3)]
    films[0] = replace(films[0], prompt="cut short")
    events = floor.run(films)
    assert len(outcomes(events)) == 3
    assert len(deaths(events)) == 1
    assert (floor.marks / "f0.found").read_bytes() == b"2"
    assert (floor.marks / "f1.found").read_bytes() == b""
    assert not (floor.out / "latents").exists(), "what is done needs none"


def test_a_journal_that_is_removed_stops_all_and_the_next_run_makes_all(
    floor: Floor, some: Some
) -> None:
    removed: list[Event] = []

    def remove(event: Event, _: Replicas) -> None:
        if is_done(event) and not removed:
            for path in (floor.out / "pieces").glob("*.jsonl"):
                path.unlink()
            removed.append(event)

    with pytest.raises(JournalError, match=r"000\d\.jsonl was removed"):
        floor.run(some(30), each=remove)
    floor.assert_all_gone()
    floor.run(some(30))
    assert Counter(line["custom_id"] for line in floor.lines) == Counter(
        job.custom_id for job in some(30)
    )


def test_a_disk_that_is_full_for_the_journal_ends_every_replica(floor: Floor, some: Some) -> None:
    floor.environment = {n: {"DISK_FULL_AFTER": "2"} for n in range(2)}
    with pytest.raises(StorageError, match="the disk is full"):
        floor.run(some(30))
    floor.assert_all_gone()
    assert 2 <= len(floor.lines) <= 5


def test_attempts_count_on_from_the_journal(floor: Floor, some: Some) -> None:
    floor.run(some(3, j0="fail"))
    config = floor.config(2)
    with RunFolder(floor.out) as folder:
        jobs = some(3, j0="fail")
        rest = resume(folder, jobs, config, ResumePolicy(retry_failed=True))
        assert [job.custom_id for job in rest.to_run] == ["j0"]
        (event,) = [
            event
            for event in floor.replicas(config).run(floor.plan(rest.to_run), folder)
            if isinstance(event, JobEnded) and not event.is_done
        ]
    assert event.outcome.attempt == 2


def test_loads_are_told_with_the_replica(floor: Floor, some: Some) -> None:
    events = floor.run(some(10, j0="company"))
    assert sorted(e.replica for e in events if isinstance(e, ModelLoaded)) == [0, 1]  # type: ignore[type-var]


# The command without what needs torch: neither its replicas nor what run.json says of GPUs.
PARENT = """
import os, sys
from functools import partial
sys.path.append(sys.argv.pop(1))
from hyimg_cli.engine import run as manifest_run
from hyimg_cli.cli.app import run
from hyimg_cli.engine.replicas import run as module
manifest_run.run_info = lambda *_: {}
fake = {"session": "fake_replica:FakeSession"}
module.Replicas = partial(module.Replicas, setup=fake)
code = run(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize(
    "kill",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), "twice"],
)
def test_a_command_that_is_killed_leaves_no_process_and_resumes(
    floor: Floor, write_manifest: Callable[..., Path], kill: Any
) -> None:
    lines = [{"custom_id": f"j{n}", "prompt": "a dog", "steps": 4} for n in range(24)]
    lines[0] |= {"prompt": "hang"} if kill == "twice" else {}
    manifest, out = write_manifest(*lines), floor.out
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PARENT, tests]
    command += ["generate", str(manifest), "-o", str(out)]
    command += ["--replicas", "2", "--device", "cpu", "--no-report", "--json"]
    command += ["--ray-address", floor.ray_address] if floor.ray_address else []
    floor.hold(2)
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: line_count(out) >= 2)
    wait_for(lambda: len(list(floor.marks.glob("*.at-work"))) == 2)
    wait_for(lambda: list(floor.marks.glob("*.held")))
    if kill == "twice":
        wait_for((floor.marks / "j0.mark").exists)
        time.sleep(1)  # the run hears of these jobs: who has begun none is killed, not stopped
    replicas = [psutil.Process(pid) for pid in floor.pids]
    if kill in ("twice", signal.SIGKILL):
        replicas[1].suspend()
    os.kill(ran.pid, signal.SIGTERM if kill == "twice" else kill)
    if kill == "twice":
        wait_for(lambda: list(floor.marks.glob("*.stopped")) or not all(map(is_alive, floor.pids)))
        time.sleep(0.3)
        assert ran.poll() is None, "it waits for the step of the job that hangs"
        os.kill(ran.pid, signal.SIGTERM)
    _, messages = ran.communicate(timeout=WAIT_S)
    wanted = {-9} if kill == signal.SIGKILL else {143, -15} if floor.ray_address else {143}
    assert ran.returncode in wanted, messages
    _, alive = psutil.wait_procs(replicas, timeout=WAIT_S)
    assert alive == []
    done = line_count(out)
    assert done < 24
    floor.hold(None)
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])["summary"]
    assert (summary["done"], summary["skipped"]) == (24 - done, done)
    assert floor.leftovers == []


def line_count(out: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in RunFolder(out).journals())


def test_each_replica_sees_one_gpu_and_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = RunConfig(OutputConfig(Path("out")), model=ModelChoice(device="cpu"))
    gpu = RunConfig(OutputConfig(Path("out")), model=ModelChoice(device="cuda"))
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr("hyimg_cli.parallel.devices.gpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    assert LocalProcesses(cpu, Plan(()), 2).environment(1) == share
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert LocalProcesses(cpu, Plan(()), 2).environment(1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-55,6,7")
    assert LocalProcesses(gpu, Plan(()), 3).environment(1) == {"CUDA_VISIBLE_DEVICES": "GPU-55"}
    pairs = replace(gpu, parallel=ParallelConfig(tensor_ranks=2))
    assert LocalProcesses(pairs, Plan(()), 2).environment(1) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert LocalProcesses(gpu, Plan(()), 3).environment(2) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert LocalProcesses(pairs, Plan(()), 3).environment(2) == {"CUDA_VISIBLE_DEVICES": "4,5"}


@on_processes
def test_memory_that_cannot_hold_them_all_is_said_before_any_starts(
    floor: Floor, some: Some, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_main_memory(monkeypatch, 100_000_000)  # a tiny model has 39 MB
    with pytest.raises(MachineError, match=r"5 replicas need .* for weights each") as raised:
        floor.run(some(9), 5)
    assert (raised.value.code, raised.value.hint) == ("machine.memory", "use fewer --replicas")
    assert floor.started == []
    assert len(outcomes(floor.run(some(9), 2))) == 9


def test_on_a_cpu_each_plans_for_its_part_of_memory(
    job: ImageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_main_memory(monkeypatch, 64_500_000_000)
    cpu = RunConfig(OutputConfig(Path("out")), model=ModelChoice(device="cpu"))
    gpu = replace(cpu, model=ModelChoice(device="cuda"))
    asked = replace(cpu, batch=BatchConfig(memory_gb=30))
    parts = [replica_config(one, 4).batch.memory_gb for one in (cpu, asked, gpu)]
    assert parts == [16.125, 7.5, None]
    assert replica_config(cpu, 1) == cpu
    # Which jobs are done is known by the run's own configuration.
    assert pixel_settings(job, cpu) == pixel_settings(job, replica_config(cpu, 4))


@pytest.mark.ray
@pytest.mark.thorough
def test_who_waits_for_room_is_not_taken_for_dead(
    ray_cluster: str, tmp_path: Path, some: Some
) -> None:
    from ray.util import placement_group, remove_placement_group

    from hyimg_cli.engine.replicas import cluster

    (tmp_path / "marks").mkdir()
    floor = Floor(tmp_path / "out", tmp_path / "marks", ray_address=ray_cluster)
    floor.limits = Limits(start_s=20.0)
    floor.environment = {n: {"PACE_S": "0.1"} for n in range(4)}
    cluster.connect(floor.config(4))
    others = placement_group([{"CPU": 2}])
    assert others.wait(30)
    began = time.monotonic()
    events = floor.run([replace(job, num_inference_steps=20) for job in some(24)], 4)
    assert time.monotonic() - began > 20
    remove_placement_group(others)
    assert deaths(events) == []
    assert len({one.replica for one in outcomes(events).values()}) == 2


@pytest.mark.ray
@pytest.mark.usefixtures("ray_environment")  # it imports Ray, which reads it once
def test_what_a_killed_command_leaves_of_its_cluster_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyimg_cli.engine.replicas import cluster

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "_FOLDERS", [])
    monkeypatch.setattr("atexit.register", lambda *_: None)
    killed = tmp_path / f"hyimg-replica-{2**22 + 1}-x"
    killed.mkdir()
    own = Path(cluster._own(2)["_temp_dir"])
    assert (killed.exists(), own.parent) == (False, tmp_path)


@pytest.mark.ray
def test_our_signal_handlers_survive_ray(ray_cluster: str, tmp_path: Path) -> None:
    import ray

    from hyimg_cli.engine.replicas import cluster

    def handler(*_: object) -> None: ...

    numbers = signal.SIGINT, signal.SIGTERM
    before = {number: signal.signal(number, handler) for number in numbers}
    parallel = ParallelConfig(replicas=3, ray_address=ray_cluster)
    config = RunConfig(OutputConfig(tmp_path), parallel=parallel)
    ray.shutdown()
    try:
        cluster.connect(config)
        assert {signal.getsignal(number) for number in numbers} == {handler}
        # Two machines of two cores each: three replicas have one, two have two.
        assert [cluster._needs(config, count) for count in (3, 2)] == [
            {"num_cpus": 1},
            {"num_cpus": 2},
        ]
        with pytest.raises(MachineError, match="5 replicas need 5 CPUs, but the Ray cluster has 4"):
            cluster._needs(config, 5)
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@pytest.mark.ray
@pytest.mark.parametrize("listens", [True, False])
def test_a_cluster_that_is_not_there_or_is_stopped_is_told_soon(
    ray_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listens: bool
) -> None:
    """Ray itself tries for minutes; the system accepts calls of a process that is stopped."""
    import ray

    from hyimg_cli.engine.replicas import cluster

    monkeypatch.setattr(cluster, "_CALL_S", 0.2)
    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = "{}:{}".format(*server.getsockname())
        if not listens:
            server.close()
        parallel = ParallelConfig(replicas=2, ray_address=address)
        with pytest.raises(MachineError, match=f"no Ray cluster at {address}: no response"):
            cluster.connect(RunConfig(OutputConfig(tmp_path), parallel=parallel))


@pytest.mark.ray
def test_a_node_that_dies_as_ray_starts_is_a_fault_of_the_cluster(
    ray_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    from hyimg_cli.engine.replicas import cluster

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore")  # as Ray does

    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    parallel = ParallelConfig(replicas=2, ray_address="auto")
    with pytest.raises(MachineError, match="The current node timed out during startup") as refused:
        cluster.connect(RunConfig(OutputConfig(tmp_path), parallel=parallel))
    assert refused.value.code == "machine.ray"


@pytest.mark.ray
def test_relative_sources_are_those_of_the_commands_folder_and_a_dead_node_ends_the_run(
    ray_cluster: str, tmp_path: Path, some: Some, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster was started in another folder. Its node dies as Ray's own list tells of it."""
    import ray

    from hyimg_cli.engine.replicas import cluster

    monkeypatch.chdir(tmp_path)
    Path("in.png").write_bytes(b"a picture")
    Path("marks").mkdir()
    floor = Floor(tmp_path / "out", tmp_path / "marks", ray_address=ray_cluster)
    events = floor.run([replace(job, images=("in.png",)) for job in some(3)])
    assert (deaths(events), len(outcomes(events))) == ([], 3)

    every = [node | {"Alive": False} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: every)
    monkeypatch.setattr(cluster, "_HEAD_S", 0.0)
    head = cluster._Head()
    with pytest.raises(MachineError, match=r"Ray node of this machine, .*stopped") as refused:
        head.confirm()
    assert (refused.value.code, head.is_gone) == ("machine.ray", True)
