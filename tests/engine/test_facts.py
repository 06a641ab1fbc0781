"""Keys come from where the work is done, and a replica that finds other things is refused."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.engine.replicas.messages import Ended, Exited, FromReplica, Ready, Setup
from hyimg_cli.engine.replicas.run import Replicas, describe_differences
from hyimg_cli.engine.replicas.worker import Worker, folder_fact, replica_facts
from hyimg_cli.engine.run import find_place
from hyimg_cli.errors import MachineError, installation
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import by_graphs, job_keys, precision
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.parallel.watch import Beat, Limits
from hyimg_cli.settings.run import MachineInfo, ModelChoice, OutputConfig, ParallelConfig, RunConfig
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Outcome, ReplicaDied
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Plan

GPU, BARE = MachineInfo(has_gpu=True, has_triton=True), MachineInfo(has_gpu=False, has_triton=False)


def config(place: MachineInfo | None = None, **changes: Any) -> RunConfig:
    choice = ModelChoice(machine=place, **changes)
    return RunConfig(OutputConfig(Path("out")), model=choice)


def test_keys_are_those_of_the_place_that_does_the_work(job: ImageJob) -> None:
    assert precision(config(GPU).model) == ("cuda", "bfloat16")
    assert precision(config(BARE).model) == ("cpu", "float32")
    assert by_graphs(config(GPU).model, 1)
    assert not by_graphs(config(GPU).model, 2)
    assert not by_graphs(config(BARE).model, 1)
    assert job_keys([job], config(GPU)) != job_keys([job], config(BARE))
    assert job_keys([job], config(GPU, device="cpu")) == job_keys([job], config(BARE))


def test_a_folder_says_where_its_results_were_made(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"place": {"has_gpu": true, "has_triton": false}}')
    base = config()
    on_ray = replace(
        base, output=OutputConfig(tmp_path), parallel=ParallelConfig(ray_address="10.0.0.1:1")
    )
    assert find_place(on_ray).model.machine == MachineInfo(has_gpu=True, has_triton=False)
    assert find_place(base) is base


def test_what_differs_is_said_by_name(job: ImageJob) -> None:
    plan = make_plan([job], registry.model_card)
    here, there = replica_facts(config(BARE), plan), replica_facts(config(GPU), plan)
    assert describe_differences(here, here) == ""
    assert describe_differences(here, there) == (
        "device cuda instead of cpu, dtype bfloat16 instead of float32, "
        "decode_graphs True instead of False"
    )
    edit = replace(job, images=("in/one.png",))
    facts = replica_facts(config(BARE), make_plan([edit], registry.model_card))
    assert describe_differences(facts | {"source picture in/one.png": "804e"}, facts) == (
        "source picture in/one.png unreadable instead of 804e"
    )


class Scripted:
    """A launcher of replicas that have these facts, and whose jobs are done at once."""

    def __init__(self, config: RunConfig, facts: list[dict[str, object]]) -> None:
        self.config, self._facts = config, facts
        self._said: list[tuple[int, FromReplica]] = []
        self._setups: dict[int, Setup] = {}
        self.begun: list[int] = []

    def start(self, setup: Setup) -> None:
        self._setups[setup.number] = setup
        facts = self._facts[setup.number] | folder_fact(RunFolder(setup.place), setup.place)
        self._said.append((setup.number, Ready(facts, "node-b")))

    def begin(self, number: int) -> None:
        self.begun.append(number)
        self.work(number, self._setups[number])
        self._said.append((number, Ended()))

    def work(self, number: int, setup: Setup) -> None:
        for piece, plan in enumerate(setup.work.pieces):
            with RunFolder(setup.place, piece=piece) as folder:
                for job in plan.jobs:
                    if not folder.attempts[job.custom_id]:
                        folder.append(Outcome(job.custom_id, "done", "", replica=number))

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        said, self._said = self._said, []
        return said

    def stop(self, number: int, signal_number: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def close(self) -> None: ...


class Fatal(Scripted):
    """Replicas that die of each job, until it is given up."""

    def begin(self, number: int) -> None:
        setup = self._setups[number]
        worker = Worker(replace(setup, session=f"{__name__}:Deadly"))
        *_, ended = worker.run()
        assert isinstance(ended, Ended)
        self._said.append((number, Exited("killed by SIGKILL") if ended.trace else ended))


class Deadly:
    """A session that stops without a trace behind the begin of a job."""

    def __init__(self, config: RunConfig) -> None: ...

    def run(self, plan: Plan, folder: RunFolder, *, whole: Plan) -> Iterator[Event]:
        yield JobStarted(plan.jobs[0].custom_id)
        raise RuntimeError("killed")


class Crowded(Scripted):
    """Replica 1 waits for room as long as replica 0 works: for ten looks."""

    _looks = 0

    def start(self, setup: Setup) -> None:
        if setup.number == 0:
            super().start(setup)

    def work(self, number: int, setup: Setup) -> None: ...

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        time.sleep(0.05)
        if self.begun:
            self._said = []
            self._looks += 1
            if self._looks == 10:
                super().work(0, self._setups[0])
        return [(1, Beat()), *super().events(timeout_s)]


def test_who_waits_for_room_is_not_taken_for_dead(job: ImageJob, tmp_path: Path) -> None:
    mine = RunConfig(OutputConfig(tmp_path), parallel=ParallelConfig(replicas=2))
    jobs = [replace(job, custom_id=f"j{n}", prompt=f"{n}") for n in range(2)]
    plan = make_plan(jobs, registry.model_card)
    crowded = Crowded(mine, [replica_facts(mine, plan)])
    limits = Limits(start_s=0.2, silence_s=10.0)
    with RunFolder(tmp_path) as folder:
        run = Replicas(mine, launcher=lambda *_: crowded, limits=limits)
        events = list(run.run(plan, folder))
    assert [type(event) for event in events] == [JobEnded] * 2
    assert crowded.begun == [0]


Run = Callable[..., tuple[Scripted, list[Event]]]


@pytest.fixture
def run(job: ImageJob, tmp_path: Path) -> Run:
    def go(*changes: dict[str, Any], place: MachineInfo = BARE) -> tuple[Scripted, list[Event]]:
        parallel = ParallelConfig(replicas=len(changes))
        mine = RunConfig(
            OutputConfig(tmp_path), model=ModelChoice(machine=place), parallel=parallel
        )
        jobs = [replace(job, custom_id=f"j{n}", prompt=f"{n}") for n in range(6)]
        plan = make_plan(jobs, registry.model_card)
        facts = [replica_facts(mine, plan) | change for change in changes]
        scripted = Scripted(mine, facts)
        with RunFolder(tmp_path) as folder:
            events = list(Replicas(mine, launcher=lambda *_: scripted).run(plan, folder))
        return scripted, events

    return go


def test_a_replica_that_differs_is_refused_before_it_gets_a_job(run: Run) -> None:
    scripted, events = run({}, {"dtype": "bfloat16"})
    assert set(scripted.begun) == {0}
    (death,) = [event for event in events if isinstance(event, ReplicaDied)]
    assert death.why == "refused (node-b), it has dtype bfloat16 instead of float32"
    assert not death.starts_again


def test_replicas_that_all_differ_end_the_run_and_it_is_said_where_files_are_looked_for(
    run: Run,
) -> None:
    lacks = {"source picture in/a.png": "unreadable"}
    with pytest.raises(MachineError, match="every replica died") as ended:
        run({"dtype": "bfloat16"}, {"dtype": "bfloat16"} | lacks)
    assert f"under the same paths (relative ones: in {Path.cwd()})" in ended.value.hint


ON_CPU = {"device": "cpu", "dtype": "float32", "decode_graphs": False}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (ON_CPU, "device cpu instead of cuda, dtype float32 instead of bfloat16, "
         "decode_graphs False instead of True"),
        ({"decode_graphs": False}, "decode_graphs False instead of True"),
        ({"tensor ranks": 2}, "tensor ranks 2 instead of 1"),
    ],
)  # fmt: skip
def test_a_head_without_a_gpu_drives_workers_that_have_one(
    run: Run, job: ImageJob, change: dict[str, Any], told: str
) -> None:
    """What the head has itself decides nothing: the run is the place's, and so are its keys."""
    scripted, events = run({}, change, place=GPU)
    assert set(scripted.begun) == {0}
    (death,) = [event for event in events if isinstance(event, ReplicaDied)]
    assert death.why == f"refused (node-b), it has {told}"


def test_a_lost_job_has_the_key_of_where_it_was_lost(job: ImageJob, tmp_path: Path) -> None:
    parallel = ParallelConfig(replicas=2)
    mine = RunConfig(OutputConfig(tmp_path), model=ModelChoice(machine=GPU), parallel=parallel)
    plan = make_plan([job], registry.model_card)
    fatal = Fatal(mine, [replica_facts(mine, plan)] * 2)
    with RunFolder(tmp_path) as folder:
        list(Replicas(mine, launcher=lambda *_: fatal).run(plan, folder))
        (line,) = folder.results().values()
    assert line["error"]["code"] == "replica.died"
    assert line["key"] == job_keys([job], config())[job.custom_id]
    assert line["key"] != job_keys([job], config(GPU))[job.custom_id]


def test_the_packages_of_the_first_are_those_of_all(run: Run) -> None:
    newer = {"torch": "9.9"}
    scripted, events = run(newer, {}, newer)
    assert set(scripted.begun) == {0, 2}
    assert [event.replica for event in events if isinstance(event, ReplicaDied)] == [1]
    with pytest.raises(MachineError, match=r"every replica died: .*refused .* hyimg 0\.0"):
        run({"hyimg": "0.0"})


def test_without_ray_the_extra_that_brings_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hyimg_cli.errors.find_spec", lambda name: None)
    on_ray = replace(
        config(), output=OutputConfig(tmp_path), parallel=ParallelConfig(ray_address="auto")
    )
    with pytest.raises(MachineError, match="ray is not installed") as raised:
        find_place(on_ray)
    assert raised.value.hint == installation("ray")
