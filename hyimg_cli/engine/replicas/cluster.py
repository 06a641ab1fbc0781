"""Replicas as actors of a Ray cluster, on all of its machines.

Ray finds places and GPUs for them and starts them; it restarts and retries nothing. Ray does not
notice stopped processes, so hyimg uses its own heartbeat.
"""

import atexit
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hyimg_cli.engine.replicas.messages import Ended, EventBatch, Exited, FromReplica, Ready, Setup
from hyimg_cli.engine.replicas.worker import Worker
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.disk import is_process
from hyimg_cli.journal.keys import here
from hyimg_cli.journal.provenance import cores
from hyimg_cli.memory.available import replica_config
from hyimg_cli.parallel.launch import tie_to
from hyimg_cli.parallel.watch import AwakeClock, Beat
from hyimg_cli.settings.run import MachineInfo, RunConfig
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import counted

# Maximum number of unread messages per replica, and of messages read at once.
_WAITING = 64
_AT_ONCE = 64
# Seconds between calls to the cluster's head, and how long it may stay silent.
_HEAD_S, _HEAD_GONE_S = 5.0, 15.0
_CALL_S = 10.0
# How long a replica, or a query about a machine, may wait for room.
_ROOM_S = 600.0
_OBJECT_STORE_BYTES = 400_000_000
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# Folders of clusters that were started here.
_FOLDERS: list[str] = []
_IN_WATCH = ray.method(concurrency_group="watch")


class Replica:
    """A replica on its machine: `run` works in a thread, while other calls are answered."""

    def __init__(self, setup: Setup, working_folder: str) -> None:
        """`working_folder`: the run's; relative paths of sources and models are valid in it."""
        tie_to(os.getppid())  # the node's process; otherwise a stopped replica would outlive it
        tempfile.tempdir = str(_own_folder())  # removed with all files of ranks and libraries
        try:
            os.chdir(working_folder)
        except OSError:
            # Not where Ray was started: a file of the same name there would be another one.
            os.chdir(tempfile.tempdir)
        self._setup = replace(setup, local=None)
        self._worker: Worker | None = None

    def up(self) -> Ready:
        """Import the session, and return the facts of this machine."""
        self._worker = Worker(self._setup)
        return Ready(self._worker.facts, socket.gethostname())

    def run(self) -> Iterator[EventBatch | Ended]:
        """Take pieces until none is left."""
        assert self._worker is not None, "a replica begins when it is up"
        yield from self._worker.run()

    @_IN_WATCH
    def beat(self) -> Beat:
        return Beat() if self._worker is None else self._worker.steps.beat()

    @_IN_WATCH
    def stop(self, signal_number: int) -> None:
        if self._worker is not None:
            self._worker.stop(signal_number)


@dataclass(eq=False)
class _Actor:
    """A replica as the run sees it.

    `handle`: the actor. `asked`: unanswered calls by name: up, run, beat. `room`: its
    placement group, requested at `began`; its process starts only when `has_room`.
    """

    handle: Any
    room: Any
    beat_s: float
    asked: dict[str, Any] = field(default_factory=dict)
    beat_at: float = 0.0
    began: float = field(default_factory=time.monotonic)
    has_room: bool = False

    def awaited(self) -> Iterable[Any]:
        """Return the pending calls, after requesting a heartbeat if one is due."""
        if "beat" not in self.asked and time.monotonic() - self.beat_at >= self.beat_s:
            self.asked["beat"], self.beat_at = self.handle.beat.remote(), time.monotonic()
        return self.asked.values()

    def answer(self, awaited: Any) -> Any:
        """Return the reference of an answer that can be read now; None after the last of `run`."""
        name = next(name for name, one in self.asked.items() if one is awaited)
        found = next(awaited, None) if name == "run" else awaited
        if name != "run" or found is None:
            del self.asked[name]
        return found


class RayCluster:
    """A launcher of actors, wherever the cluster has room."""

    def __init__(self, config: RunConfig, plan: Plan, count: int) -> None:
        """Raises MachineError if the cluster is missing or lacks what the replicas need."""
        connect(config)
        self._needs = _needs(config, count)
        each = -(-count // len(_nodes()))
        # Derived from this machine's memory; machines without GPUs are assumed to be alike.
        self.config = replica_config(config, each)
        self._starting: dict[int, Setup] = {}
        self._actors: dict[int, _Actor] = {}
        self._head = _Head()

    def start(self, setup: Setup) -> None:
        self._starting[setup.number] = setup

    def _begin(self, setup: Setup) -> None:
        remote: Any = ray.remote  # its type hints lack concurrency groups
        of_ray = remote(max_restarts=0, max_task_retries=0, concurrency_groups={"watch": 2})
        what = {"num_cpus": "CPU", "num_gpus": "GPU"}
        room = placement_group([{what[name]: n for name, n in self._needs.items() if n}])
        actor = of_ray(Replica).options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(room),
            **self._needs,
            **self.options(setup.number),
        )
        handle = actor.remote(setup, os.getcwd())
        up = {"up": handle.up.remote()}
        self._actors[setup.number] = _Actor(handle, room, setup.beat_s, up)

    def options(self, number: int) -> dict[str, Any]:
        """Return further options of a replica's actor."""
        return {}

    def begin(self, number: int) -> None:
        actor = self._actors[number]
        run = actor.handle.run.options(
            num_returns="streaming", _generator_backpressure_num_objects=_WAITING
        )
        actor.asked["run"] = run.remote()

    def stop(self, number: int, signal_number: int) -> None:
        if number in self._actors:
            self._actors[number].handle.stop.remote(signal_number)

    def events(self, timeout_s: float) -> list[tuple[int, FromReplica]]:
        self._head.confirm()
        if self._starting and self._head.answers():
            while self._starting:
                self._begin(self._starting.popitem()[1])
        waiting = {one: n for n, actor in self._actors.items() for one in actor.awaited()}
        said = [
            (number, _message(answer))
            for awaited, number in self._ready(waiting, timeout_s)
            if (answer := self._actors[number].answer(awaited)) is not None
        ]
        # A single query covers all replicas that wait for room.
        without = {n: actor for n, actor in self._actors.items() if not actor.has_room}
        if without and self._head.answers():
            rooms = placement_group_table()
            for actor in without.values():
                actor.has_room = rooms.get(actor.room.id.hex(), {}).get("state") == "CREATED"
        for number, actor in without.items():
            if not actor.has_room:
                is_late = time.monotonic() - actor.began > _ROOM_S
                none = Exited(f"no room on the Ray cluster for {_ROOM_S:.0f} s")
                said.append((number, none if is_late else Beat()))
        for number, message in said:
            if isinstance(message, Exited):
                self.kill(number)
        return said

    def kill(self, number: int) -> None:
        self._starting.pop(number, None)
        actor = self._actors.pop(number, None)
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor.handle, no_restart=True)
                if self._head.answers():  # else its room is freed with this job
                    remove_placement_group(actor.room)

    def close(self) -> None:
        for number in list(self._actors):
            self.kill(number)
        if not self._head.is_gone:
            disconnect()
            return
        # A head that is gone or stopped may never answer.
        leaving = threading.Thread(target=disconnect, daemon=True)
        leaving.start()
        leaving.join(_CALL_S)
        if leaving.is_alive():
            atexit.register(_end_at_once)

    def _ready(self, waiting: dict[Any, int], timeout_s: float) -> list[tuple[Any, int]]:
        """Return all calls that have an answer now; wait for the first one."""
        if not waiting:
            time.sleep(timeout_s)
            return []
        every, count = list(waiting), len(waiting)
        ready, _ = ray.wait(every, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:
            ready, _ = ray.wait(every, num_returns=count, timeout=0.02, fetch_local=False)
        return [(one, waiting[one]) for one in ready[:_AT_ONCE]]


def _message(answer: Any) -> FromReplica:
    """Return what a replica answered; `Exited` if it is gone."""
    try:
        message: FromReplica = ray.get(answer)
    except RayError as error:
        if isinstance(error, RayActorError) and not error.actor_init_failed:
            return Exited("its process or machine is gone")
        return Exited(str(error).strip().splitlines()[-1])
    return message


class _Head:
    """The cluster's head, and the Ray node of this process.

    Without the head Ray ends this process after a minute, without a message. Until then every query
    to the head would block, so it is called before each query. Without its node, this process would
    wait for answers forever.
    """

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._address, self._node = _host_and_port(context.gcs_address), context.get_node_id()
        # While this process was stopped, it could not call the head.
        self._clock = AwakeClock(most_s=_HEAD_S)
        self._called_at = self._heard_at = self._looked_at = self._clock()
        self.is_gone = False

    def confirm(self) -> None:
        """Raise MachineError if the head has not answered for some time, or the node is dead."""
        if self._clock() - self._looked_at >= _HEAD_S:
            self._looked_at = self._clock()
            if self.answers():
                self._refuse_dead_node()
        if self._called_at - self._heard_at > _HEAD_GONE_S:
            self.is_gone = True
            raise MachineError(
                "the head of the Ray cluster stopped responding",
                where=":".join(map(str, self._address)),
                hint="start the cluster, then run the same command again to resume",
                code="machine.ray",
            )

    def _refuse_dead_node(self) -> None:
        node = next((one for one in ray.nodes() if one["NodeID"] == self._node), None)
        if node is not None and not node["Alive"]:
            self.is_gone = True
            raise MachineError(
                f"the Ray node of this machine, {node['NodeManagerHostname']}, stopped responding",
                where=str(node["NodeManagerAddress"]),
                hint="start the cluster, then run the same command again to resume",
                code="machine.ray",
            )

    def answers(self) -> bool:
        """True if it answers now."""
        self._called_at = self._clock()
        is_there = not self.is_gone and _answers(*self._address, timeout_s=1.0)
        if is_there:
            self._heard_at = self._called_at
        return is_there


def _answers(host: str, port: int, timeout_s: float) -> bool:
    """True if something at this address answers an HTTP/2 greeting, as Ray's clients send.

    A connection alone proves nothing: the system accepts connections even to a stopped process.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as line:
            line.sendall(_GREETING)
            line.recv(1)
    except OSError:
        return False
    return True


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def place_of(config: RunConfig) -> MachineInfo:
    """Return the facts of a cluster machine that has room for a replica. Raises MachineError."""
    connect(config)
    probe = ray.remote(here).options(max_retries=0, **_needs(config, config.parallel.replicas))
    asked, head, until = probe.remote(), _Head(), time.monotonic() + _ROOM_S
    try:
        while not ray.wait([asked], timeout=1.0)[0] and time.monotonic() < until:
            head.confirm()
        return ray.get(asked, timeout=1.0)
    except RayError as error:
        what = f"no machine of the Ray cluster responds: {str(error).strip().splitlines()[-1]}"
        raise MachineError(what, hint="check ray status", code="machine.ray") from error


def _nodes() -> list[dict[str, Any]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _needs(config: RunConfig, count: int) -> dict[str, Any]:
    """Return the Ray resources of each replica: GPUs for its ranks, or its share of the cores.

    Raises MachineError if the cluster has no room for all replicas.
    """
    choice, ranks, nodes = config.model, config.parallel.of_session, _nodes()
    gpus, cpus = ([int(node.get(what, 0)) for node in nodes] for what in ("GPU", "CPU"))
    has_gpu = any(gpus) if choice.machine is None else choice.machine.has_gpu
    is_on_gpu = choice.kind(has_gpu=has_gpu) == "cuda"
    what, there, each = ("GPU", gpus, ranks) if is_on_gpu else ("CPU", cpus, 1)
    fit = sum(one // each for one in there)
    if fit < count:
        raise MachineError(
            f"{count} replicas need {count * each} {what}s, but the Ray cluster has "
            f"{sum(there)} on {counted(len(nodes), 'machine')}",
            hint=f"use --replicas {fit}" if fit else "use --device cpu, or a cluster with GPUs",
            code="machine.replicas",
        )
    if is_on_gpu:
        return {"num_gpus": ranks, "num_cpus": 0}
    shares = range(1, max(there) + 1)
    return {"num_cpus": max(n for n in shares if sum(one // n for one in there) >= count)}


def connect(config: RunConfig) -> None:
    """Join the cluster that `config` names, or start a local one. Raises MachineError."""
    if ray.is_initialized():
        return
    # Ray replaces the SIGTERM handler; restoring ours lets a run end in order.
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    address = config.parallel.ray_address or "auto"
    own = _own(config.parallel.replicas) if address == "local" else {}
    try:
        # Ray itself would keep trying for minutes.
        if re.fullmatch(r"[^/]+:\d+", address) and not _answers(*_host_and_port(address), _CALL_S):
            raise OSError(f"no response within {_CALL_S:.0f} s")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # Ray raises plain ones, for example if its node dies at its start
        disconnect()
        raise MachineError(
            f"no Ray cluster at {address}: {str(error).strip().splitlines()[0]}",
            hint="check ray status and RAY_AUTH_TOKEN; --ray-address local starts a cluster on "
            "this machine",
            code="machine.ray",
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _own(replicas: int) -> dict[str, Any]:
    """Return options for a cluster on this machine that ends with this process."""
    _FOLDERS.append(str(_own_folder()))  # a killed process's folder is removed by a later one
    atexit.register(disconnect)
    return {
        "num_cpus": max(cores(), replicas),
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_temp_dir": _FOLDERS[-1],
    }


def _own_folder() -> Path:
    """Create a temporary folder of this process; remove those of killed processes."""
    for left in Path(tempfile.gettempdir()).glob("hyimg-replica-[0-9]*"):
        if not is_process(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"hyimg-replica-{os.getpid()}-"))


def _end_at_once() -> None:
    """Exit as a failed run without further cleanup, because what is left of Ray would crash."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(MachineError.exit_code)


def disconnect() -> None:
    """Leave the cluster; end a local one and remove its folders."""
    ray.shutdown()
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop(), ignore_errors=True)
