"""Processes that work with this one: started once, kept for the run, ended with it.

    this process   rank 0   RankPool ── a pipe to each: tasks out, answers back; it ends with us ─┐
    main           ranks 1, 2, ..   a loop over tasks, and the parts it was told to load  ◀───────┘
                   all ranks        one torch.distributed group (gloo on CPU, nccl on GPUs): tensors

A task is a function of a module, called on every rank with that rank first; rank 0's share runs
here, in the caller's thread. Tiles, branches and tensor-parallel layers are all tasks, and use the
group (send, all_reduce) as they need.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyimg_cli.errors import MachineError, RankError
from hyimg_cli.parallel.devices import refuse_missing_gpus
from hyimg_cli.parallel.launch import ChildProcess, Parent
from hyimg_cli.parallel.watch import BEAT_S, LIMITS, Limits, Steps
from hyimg_cli.parallel.wire import SHORT, Failed, Member, Numerics, loopback, silence, watch

logger = logging.getLogger(__name__)
DeviceKind = Literal["cpu", "cuda"]

_JOIN_S = 120.0
# Seconds to wait after an error of rank 0 for the death of another rank, its likely cause.
_BLAME_S = 3.0


@dataclass
class Rank:
    """A task's rank: its number, its device, and the parts loaded on it.

    `timeout_s` is the longest wait for another rank that is alive.
    """

    number: int
    size: int
    device: torch.device
    timeout_s: float
    parts: dict[str, Any] = field(default_factory=dict)


Loader = Callable[[Rank], Any]
# A function, and its arguments after the rank.
Task = tuple[Callable[..., Any], tuple[Any, ...]]


class RankPool:
    """`size` ranks: this process and `size - 1` others. With one rank, no process and no group.

    Members start at the first use. A fault in any rank ends the task with an error and ends the
    members; the next task starts new ones, which load their parts again. `branch_sets`: equal sets
    of ranks, each with a whole picture model. `timeout_s`: longest wait for a rank that neither
    answers nor dies; a death is noticed at once. `limits` end a stopped member, and a task that
    takes far longer than before. `stopped` tells users of the pool when members end; `generation`
    counts how often.
    """

    def __init__(
        self,
        size: int,
        *,
        device: DeviceKind = "cpu",
        branch_sets: int = 1,
        timeout_s: float = 1800.0,
        limits: Limits = LIMITS,
        beat_s: float = BEAT_S,
    ) -> None:
        assert size >= 1, "a pool has at least this process"
        if device == "cuda":
            refuse_missing_gpus(size, "ranks", "use fewer ranks, or --device cpu")
        self.size, self.branch_sets = size, branch_sets
        self.here = Rank(0, size, _device(device, 0), timeout_s)
        self._kind: DeviceKind = device
        # The parts that ranks hold, or will hold once started: by name, the loader and the number
        # of ranks.
        self.parts: dict[str, tuple[Loader, int]] = {}
        self.stopped: list[Callable[[], None]] = []
        self.generation = 0
        self._members: list[Member] = []
        self._limits, self._beat_s = limits, beat_s
        self._steps, self._over = Steps(), threading.Event()
        self._has_group = False
        self._scratch: TemporaryDirectory[str] | None = None

    @property
    def member_pids(self) -> list[int]:
        """Return the process ids of ranks 1, 2, …; empty if none runs."""
        return [member.child.process.pid for member in self._members]

    def launch(self) -> None:
        """Begin to start the members without waiting for them."""
        if not self._members:
            self._members = [
                Member(n, ChildProcess("hyimg_cli.parallel.ranks", beat_s=self._beat_s))
                for n in range(1, self.size)
            ]
            self._over = threading.Event()
            watched = (tuple(self._members), self._steps, self._limits, self._over)
            threading.Thread(target=watch, args=watched, daemon=True).start()

    def start(self) -> None:
        """Start the members, form the group, load every part that was requested before.

        Raises MachineError if a member does not start.
        """
        if self.size == 1 or self._has_group:
            return
        try:
            self.launch()
            self._join()
            for name, (loader, ranks) in self.parts.items():
                self._on_all((load_part, (name, loader)), ranks, lambda: None)
        except BaseException as error:
            self.stop()
            if isinstance(error, RankError):
                raise MachineError(
                    f"the ranks did not start: {error.what}",
                    hint="use fewer ranks; each needs memory for what it loads",
                    code="machine.ranks",
                ) from error
            raise

    def revive(self) -> None:
        """Restart if a member has ended since the last task, which would fail otherwise.

        Raises MachineError if a member does not start.
        """
        ended = [m.number for m in self._members if m.child.process.poll() is not None]
        if ended:
            logger.warning("rank %d ended while it was idle; restarting the ranks", ended[0])
            self.stop()
        self.start()

    def load(
        self,
        name: str,
        loader: Loader,
        *,
        ranks: int | None = None,
        own: Callable[[], Any] | None = None,
    ) -> None:
        """Have ranks 0 to `ranks - 1` hold `loader(rank)` as their part `name`.

        `loader` is picklable. `own`: what rank 0 calls instead, while the others load. A part of
        the same name is replaced. Raises what the loader raises, wherever it runs.
        """
        count = self.size if ranks is None else ranks
        self.start()
        self.parts[name] = loader, count
        try:
            own = own or partial(loader, self.here)
            self.here.parts[name] = self._on_all((load_part, (name, loader)), count, own)[0]
        except BaseException:
            del self.parts[name]
            self.stop()
            raise

    def unload(self, name: str) -> None:
        """Remove the part `name` from every member: they end, and restart with their others."""
        self.stop()
        self.parts.pop(name, None)

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        own: Callable[[], Any] | None = None,
    ) -> list[Any]:
        """Call `work(rank, *args)` on ranks 0 to `ranks - 1` (default: all); return the results.

        `own`: what rank 0 runs instead. Arguments and answers are picklable and small: tensors
        travel through the group. Raises RankError if a member died or failed,
        torch.OutOfMemoryError if one had too little memory, and what rank 0 itself raised; the
        members are then ended.
        """
        count = self.size if ranks is None else ranks
        assert 1 <= count <= self.size, f"{count} ranks of {self.size}"
        if count > 1:
            self.start()
        try:
            self._steps.begin(work.__qualname__ if count > 1 else "")
            return self._on_all((work, args), count, own or partial(work, self.here, *args))
        except BaseException as error:
            blamed = error
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                # Perhaps an error of the group, which rank 0 met while it waited for a member that
                # failed.
                faults = [fault for member in self._members if (fault := member.fault(_BLAME_S))]
                if faults:
                    blamed = min(faults, key=lambda fault: fault.at).error
                elif "timed out" in str(error).lower():
                    blamed = silence(self.here.timeout_s)
            self.stop()
            if isinstance(blamed, RankError) and blamed.code == SHORT:
                # As in one process. The member's memory is freed with it, so its next task has all
                # of it.
                raise torch.OutOfMemoryError(blamed.what) from None
            if blamed is error:
                raise
            raise blamed from error
        finally:
            self._steps.begin()

    def stop(self) -> None:
        """End the members and the group; parts of rank 0 stay, and a later task restarts."""
        members, self._members = self._members, []
        self._over.set()
        for member in members:
            member.child.hang_up()  # all end at once, then wait for each
        for member in members:
            member.child.terminate()
        if self._has_group:
            self._has_group = False
            _forget_group()
        if self._scratch is not None:
            self._scratch.cleanup()
        if members:
            self.generation += 1
            for tell in self.stopped:
                tell()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _join(self) -> None:
        """Form the group, once every member has reported that it is up."""
        if dist.is_initialized():
            raise MachineError(
                "this process already belongs to another torch.distributed group",
                hint="start hyimg without torchrun: it starts its own ranks",
                code="machine.ranks",
            )
        self._scratch = TemporaryDirectory(prefix="hyimg-ranks-", ignore_cleanup_errors=True)
        for member in self._members:
            member.receive(_JOIN_S)
        store, numerics = f"{self._scratch.name}/store", Numerics.of_this_process()
        for member in self._members:
            device = _device(self._kind, member.number)
            rank = replace(self.here, number=member.number, device=device, parts={})
            member.child.post((store, rank, numerics))
        form_group(store, self.here)
        self._has_group = True
        for member in self._members:
            member.receive(self.here.timeout_s)
        if self._kind == "cuda":
            for member in self._members:
                threading.Thread(target=self._abort_after, args=(member,), daemon=True).start()

    def _on_all(self, task: Task, ranks: int, own: Callable[[], Any]) -> list[Any]:
        """Return the results of a task on ranks 0 to `ranks - 1`; rank 0 runs `own`.

        Raises the first fault among them.
        """
        members = self._members[: ranks - 1]
        for member in members:
            member.child.post(task)
        return [own(), *(member.receive(self.here.timeout_s) for member in members)]

    def _abort_after(self, member: Member) -> None:
        """On a GPU, end rank 0's wait when a process ends, because a dead peer is not noticed."""
        member.child.process.wait()
        if member in self._members and dist.is_initialized():
            logger.warning("rank %d ended; aborting its groups", member.number)
            abort_groups()


def main(parent: Parent) -> None:
    """Run a rank: join the group, then answer each task of the line until it ends.

    Every exit is `os._exit`. Rank 0 finishes its step before it stops, and needs its ranks until
    then.
    """
    parent.send("up")
    join: tuple[str, Rank, Numerics] = pickle.loads(parent.inbox.get())
    store, rank, numerics = join
    try:
        numerics.apply()
        form_group(store, rank)
        parent.send("joined")
        while True:
            work, args = pickle.loads(parent.inbox.get())
            parent.send(work(rank, *args))
    except BaseException as error:
        # The group's other members wait for this one; they notice when its sockets close.
        parent.send(Failed.by(rank.number, error))
        os._exit(1)


def load_part(rank: Rank, name: str, loader: Loader) -> None:
    """Task: load a part on this rank."""
    rank.parts.pop(name, None)
    rank.parts[name] = loader(rank)


def form_group(store: str, rank: Rank) -> None:
    """Join the group whose members meet at the file `store`; every rank calls this."""
    kind = rank.device.type
    if kind == "cuda":
        torch.cuda.set_device(rank.device)
    with loopback():
        dist.init_process_group(
            "gloo" if kind == "cpu" else "nccl",
            store=dist.FileStore(store, rank.size),  # type: ignore[attr-defined]
            rank=rank.number,
            world_size=rank.size,
            timeout=timedelta(seconds=rank.timeout_s),
        )


def abort_groups() -> None:
    """Abort all groups of this process: a sum that waits for a dead rank is in one of them.

    All at once, because one may wait on the GPU for another.
    """
    groups = list(distributed_c10d._world.pg_names)
    with ThreadPoolExecutor(1 + len(groups)) as pool:
        list(pool.map(lambda group: group.abort(), groups))


def _forget_group() -> None:
    try:
        if dist.get_backend() == "nccl":
            # The other ranks have ended: waiting for the GPU's pending work would never end.
            abort_groups()
        dist.destroy_process_group()
    except RuntimeError as error:  # a group whose members died
        logger.debug("the group ended with %r", error)


def _device(kind: DeviceKind, number: int) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, number)
