"""A server's engine with a fake pipeline: events, ends, and isolation of each caller."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyimg_cli.engine import service as service_room
from hyimg_cli.engine.service import ServedSession, Service
from hyimg_cli.errors import ConsecutiveErrors, Interrupted, JobError, MachineError, UsageError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import AvailableMemory
from hyimg_cli.memory.fit import need
from hyimg_cli.models import registry
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue
from hyimg_cli.pipelines.request import Request
from hyimg_cli.settings.run import (
    BatchConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    RunConfig,
)
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, OutputFile, Progress
from hyimg_cli.spec.job import ImageJob

PATIENCE_S = 30.0


class FakePipeline(Pipeline[Any, Any, Any]):
    """Up to four jobs at work, a step each in turn; what becomes of a job its prompt says."""

    # A job that is slow ends when this is set.
    gate = threading.Event()
    prepared: tuple[Any, ...] = ()
    load_fault: Exception | None = None

    def use(self, model: str, jobs: Any, folder: Any) -> Iterator[Any]:
        if self.load_fault is not None:
            raise self.load_fault
        yield from ()

    def prepare(self, jobs: Any, folder: Any) -> Iterator[Any]:
        type(self).prepared = tuple(jobs)
        yield from ()

    def work(self, queue: TicketQueue) -> Iterator[None]:
        steps: dict[Ticket, int] = {}
        while True:
            for ticket in queue.take(4 - len(steps), wait=not steps):
                ticket.tell(JobStarted(ticket.job.custom_id))
                steps[ticket] = 0
            if queue.is_closed and not steps:
                return
            for ticket in [*steps]:
                if ticket.is_dropped:
                    del steps[ticket]
                    ticket.tell(Dropped(ticket.job.custom_id))
                elif "slow" in str(ticket.job.prompt) and not self.gate.is_set():
                    time.sleep(0.001)
                elif steps[ticket] < 2:
                    steps[ticket] += 1
                    ticket.tell(Progress(ticket.job.custom_id, "denoise", steps[ticket], 2))
                else:
                    del steps[ticket]
                    ticket.tell(self._end(ticket))
                yield

    def _end(self, ticket: Ticket) -> Request[Any]:
        job: Any = ticket.job
        if "crash" in job.prompt:
            raise RuntimeError("a mistake of ours")
        done = Request[Any](job, PhaseClock(ticket.submitted, lambda: None))
        done.clock.dealt_s["denoise_rest"] = 0.25
        if "machine" in job.prompt:
            return done.as_lost(MachineError("the GPU is gone", code="machine.gpu"))
        if "fail" in job.prompt:
            return done.as_lost(JobError("told to", retryable="again" in job.prompt))
        return done

    def write(self, done: Request[Any], folder: Any) -> tuple[OutputFile]:
        name, sha256 = folder.save(done.job, ".png", done.job.prompt.encode())
        return (OutputFile(name, sha256, sha256, 1, 1, done.job.seed),)

    def line_fields(self, done: Request[Any]) -> dict[str, Any]:
        return {}

    def forget(self) -> None: ...

    def cache_counts(self) -> dict[str, dict[str, int]]:
        return {}

    def peak_memory_mb(self) -> float:
        return 0.0


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    """Starts services over the fake; they are stopped at the end."""
    services = []
    monkeypatch.setattr(FakePipeline, "gate", threading.Event())
    monkeypatch.setattr(service_room, "ImagePipeline", FakePipeline)

    def start(**parts: Any) -> Service:
        choice = ModelChoice(device="cpu", dtype="float32")
        parts.setdefault("batch", BatchConfig(max_size=2, prewarm=False))
        services.append(Service(RunConfig(OutputConfig(tmp_path), model=choice, **parts)))
        services[-1].start()
        return services[-1]

    yield start
    for one in services:
        one.stop(0.0)


class Caller(threading.Thread):
    """Runs jobs in a session, in a folder and a thread of its own."""

    def __init__(self, session: ServedSession, jobs: list[ImageJob], out: Path) -> None:
        super().__init__(daemon=True)
        self.session, self._jobs, self._out = session, jobs, out
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        plan = make_plan(self._jobs, registry.model_card)
        with RunFolder(self._out) as folder:
            try:
                for event in self.session.run(plan, folder):
                    self.events.append(event)
            except Exception as error:
                self.error = error

    def ended(self) -> dict[str, str]:
        """What its journal says of its jobs, once it has ended."""
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return {name: one["status"] for name, one in RunFolder(self._out).results().items()}

    def wait_for(self, kind: type) -> None:
        until = time.monotonic() + PATIENCE_S
        while not any(isinstance(event, kind) for event in self.events):
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def jobs(job: ImageJob) -> Callable[..., list[ImageJob]]:
    def named(*prompts: str) -> list[ImageJob]:
        return [
            replace(job, custom_id=f"j{n}", prompt=prompt, bot_task="none")
            for n, prompt in enumerate(prompts)
        ]

    return named


def test_batches_with_the_same_ids_stay_apart(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    service = started()
    batches = [
        Caller(
            service.session(name, "key"), jobs(*[f"{name} {n}" for n in range(5)]), tmp_path / name
        )
        for name in "abc"
    ]
    for name, batch in zip("abc", batches, strict=True):
        assert batch.ended() == dict.fromkeys([f"j{n}" for n in range(5)], "done")
        for n in range(5):
            assert (tmp_path / name / f"outputs/j{n}.png").read_text() == f"{name} {n}"
        assert sum(isinstance(event, JobEnded) for event in batch.events) == 5


def test_what_may_pass_is_tried_again_and_each_batch_counts_its_own_failures(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    service = started(failure=FailurePolicy(max_retries=2, max_consecutive_errors=4))
    bad = Caller(service.session("a", "k"), jobs(*["fail"] * 9, "good"), tmp_path / "a")
    one = Caller(service.session("b", "k"), jobs("fail again", "good", "fail"), tmp_path / "b")
    assert one.ended() == {"j0": "failed", "j1": "done", "j2": "failed"}
    assert one.error is None
    lines = (tmp_path / "b/results.jsonl").read_text().splitlines()
    assert len(lines) == 5, "three attempts at j0, one at the others"
    assert RunFolder(tmp_path / "b").results()["j0"]["attempt"] == 3
    told = [e.outcome.custom_id for e in one.events if isinstance(e, JobEnded)]
    assert sorted(told) == ["j0", "j1", "j2"], "only the last attempt is told of"
    assert set(bad.ended().values()) == {"failed"}
    assert isinstance(bad.error, ConsecutiveErrors)


def test_a_job_of_two_drawings_is_one_job(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    """Done, failed and dropped: its caller is told of one end, and of the steps of both."""
    service, crops = started(), ((0, 0, 9, 9), (20, 20, 29, 29))
    several = [replace(job, crops=crops) for job in jobs("good", "fail", "slow")]
    caller = Caller(service.session("a", "k"), several, tmp_path / "a")
    while len([one for one in caller.events if isinstance(one, JobEnded)]) < 2:
        assert caller.is_alive()
        time.sleep(0.001)
    caller.session.request_stop(signal.SIGTERM)
    assert caller.ended() == {"j0": "done", "j1": "failed"}
    assert isinstance(caller.error, Interrupted)
    assert sum(isinstance(one, JobStarted) for one in caller.events) == 3
    # Earlier progress may be skipped.
    assert {one.total for one in caller.events if isinstance(one, Progress)} <= {4}
    assert service.counts()["at_work"] == {}


def test_a_session_that_is_stopped_leaves_the_others(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    service = started()
    stopped = Caller(service.session("a", "k"), jobs("quick", *["slow"] * 5), tmp_path / "a")
    other = Caller(service.session("b", "l"), jobs(*["slow"] * 3), tmp_path / "b")
    stopped.wait_for(JobEnded)
    stopped.session.request_stop(signal.SIGTERM)
    assert stopped.ended() == {"j0": "done"}
    assert isinstance(stopped.error, Interrupted)
    assert service.queue.counts()["batch"] <= 3, "nothing of the one that left waits"
    FakePipeline.gate.set()
    assert set(other.ended().values()) == {"done"}
    early = service.session("c", "k")
    early.request_stop(signal.SIGINT)
    nothing = Caller(early, jobs("quick"), tmp_path / "c")
    assert nothing.ended() == {}
    assert isinstance(nothing.error, Interrupted)
    assert nothing.error.exit_code == 130


def test_a_session_that_nobody_listens_to_lets_its_jobs_go(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]]
) -> None:
    service = started()
    events = service.session("a", "k").run(make_plan(jobs("slow"), registry.model_card))
    while not isinstance(next(events), JobStarted):
        pass
    assert service.counts()["at_work"] == {"queue": 1}
    events.close()
    assert service.counts()["at_work"] == {}


@pytest.mark.parametrize("grace_s", [PATIENCE_S, 0.05])
def test_at_the_end_batches_are_dropped_and_online_jobs_have_a_grace(
    started: Callable[..., Service],
    jobs: Callable[..., list[ImageJob]],
    tmp_path: Path,
    grace_s: float,
) -> None:
    service = started()
    batch = Caller(service.session("a", "k"), jobs("quick", *["slow"] * 3), tmp_path / "a")
    batch.wait_for(JobEnded)
    online = Caller(service.session("k", "k", is_online=True), jobs("slow"), tmp_path / "o")
    online.wait_for(JobStarted)
    ending = threading.Thread(target=service.stop, args=(grace_s,))
    ending.start()
    assert batch.ended() == {"j0": "done"}
    assert isinstance(batch.error, Interrupted)
    late = Caller(service.session("k", "k", is_online=True), jobs("quick"), tmp_path / "l")
    assert late.ended() == {}
    assert isinstance(late.error, Interrupted)
    if grace_s == PATIENCE_S:
        assert online.is_alive()
        FakePipeline.gate.set()
        assert online.ended() == {"j0": "done"}
    else:
        assert online.ended() == {}
        assert isinstance(online.error, Interrupted)
    ending.join(PATIENCE_S)
    assert (service.has_ended, service.is_ready, service.fault) == (True, False, None)


@pytest.mark.parametrize(
    ("prompt", "code"), [("machine", "machine.gpu"), ("crash", "machine.engine")]
)
def test_a_fault_of_the_machine_ends_the_engine_and_every_session(
    started: Callable[..., Service],
    jobs: Callable[..., list[ImageJob]],
    tmp_path: Path,
    prompt: str,
    code: str,
) -> None:
    service = started()
    other = Caller(service.session("a", "k"), jobs("quick", *["slow"] * 3), tmp_path / "a")
    other.wait_for(JobEnded)
    broken = Caller(service.session("k", "k", is_online=True), jobs(prompt), tmp_path / "b")
    assert broken.ended() == {}
    assert other.ended() == {"j0": "done"}
    for one in (broken, other):
        assert isinstance(one.error, MachineError)
        assert one.error.code == code
    service.stop(0.0)
    assert service.fault is not None
    assert service.fault.code == code
    with pytest.raises(MachineError):
        next(service.session("l", "k").run(make_plan(jobs("late"), registry.model_card)))


def test_what_loading_raises_start_raises(
    started: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePipeline, "load_fault", UsageError("not so", where="--dtype"))
    with pytest.raises(UsageError, match="not so"):
        started()


def test_the_model_is_made_ready_for_a_full_batch_of_the_usual_jobs(
    started: Callable[..., Service],
) -> None:
    service = started(batch=BatchConfig(max_size=3, tokens_between_steps=2))
    assert service.pipeline._config.batch.tokens_between_steps == 2
    counts = [len(job.images) for job in FakePipeline.prepared]
    assert counts == [0, 3] * 6, "three think and three draw at most"
    assert {str(job.size) for job in FakePipeline.prepared} == {"auto"}


def test_kept_prefixes_take_a_part_of_what_the_weights_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = ModelChoice(device="cpu", dtype="float32")
    config = RunConfig(OutputConfig(tmp_path), model=choice)
    free = need(choice.model, (), config).total + 40_000_000
    monkeypatch.setattr(service_room, "available_memory", lambda _: AvailableMemory(free))
    assert Service(config).config.batch.prefix_cache_mb == 10


def test_a_job_that_does_not_fit_alone_fails_and_takes_no_other_with_it(
    started: Callable[..., Service],
    jobs: Callable[..., list[ImageJob]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = started()
    needed = lambda model, some, config: SimpleNamespace(total=max(len(j.prompt) for j in some))  # noqa: E731
    fit = lambda model, some, config, there: SimpleNamespace(  # noqa: E731
        is_enough=len(some[0].prompt) < 9,
        refusal=lambda: MachineError("it takes 9 GB", hint="less", code="machine.memory"),
    )
    monkeypatch.setattr(service_room, "need", needed)
    monkeypatch.setattr(service_room, "fits", lambda found, there: found.total < 9)
    monkeypatch.setattr(service_room, "check_fit", fit)
    batch = Caller(service.session("a", "k"), jobs("small", "a large one"), tmp_path / "a")
    assert batch.ended() == {"j0": "done", "j1": "failed"}
    error = RunFolder(tmp_path / "a").results()["j1"]["error"]
    assert (error["code"], error["message"], error["retryable"]) == (
        "job.memory", "it takes 9 GB", False,
    )  # fmt: skip


def test_another_model_is_refused(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    other = [replace(job, model="elsewhere") for job in jobs("quick")]
    plan = SimpleNamespace(jobs=tuple(other), groups=())
    service = started()
    with pytest.raises(UsageError) as raised:
        next(service.session("a", "k").run(plan))  # type: ignore[arg-type]
    assert raised.value.code == "usage.not-served"


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"replicas": 2}, "--replicas"),
        ({"ray_address": "auto"}, "--ray-address"),
        ({"tensor_ranks": 2}, "--tensor-parallel-size"),
        ({"cfg_ranks": 2}, "--cfg-parallel-size"),
    ],
)
def test_more_than_one_process_is_refused_by_name(
    asked: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    config = RunConfig(OutputConfig(tmp_path), parallel=ParallelConfig(**asked))
    with pytest.raises(UsageError) as raised:
        Service(config)
    assert raised.value.where == flag


def test_counts_tell_of_what_waits_of_what_is_at_work_and_how_fast(
    started: Callable[..., Service], jobs: Callable[..., list[ImageJob]], tmp_path: Path
) -> None:
    service = started()
    assert service.counts() == {
        "waiting": {"online": 0, "batch": 0}, "at_work": {}, "pictures_per_s": None,
    }  # fmt: skip
    batch = Caller(service.session("a", "k"), jobs("quick", *["slow"] * 6), tmp_path / "a")
    batch.wait_for(JobEnded)
    until = time.monotonic() + PATIENCE_S
    while service.counts()["waiting"]["batch"] != 2:
        assert time.monotonic() < until
    assert service.counts()["pictures_per_s"] == 4.0
    assert sum(service.counts()["at_work"].values()) == 4
    FakePipeline.gate.set()
    batch.ended()
    assert service.counts()["at_work"] == {}
