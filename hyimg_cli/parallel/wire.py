"""Messages between rank 0 and a member, and the member as rank 0 sees it.

to a member     where the group meets, its Rank, its Numerics; then tasks: a function
                of a module and its arguments, to be called with the rank first
from a member   that it is up, and that it has joined; then the result of each task, or
                Failed and nothing more; in between, heartbeats
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from hyimg_cli.errors import HyimgError, RankError
from hyimg_cli.parallel.devices import restored_environment, set_determinism
from hyimg_cli.parallel.launch import ChildProcess
from hyimg_cli.parallel.watch import Beat, Limits, Steps, StepWatch

# The code of a RankError for a member whose device had too little memory.
SHORT = "rank.out-of-memory"


@dataclass(frozen=True)
class Numerics:
    """Settings of torch that change the last bits; members take over rank 0's."""

    threads: int
    float32_precision: str
    cudnn_allow_tf32: bool
    is_deterministic: bool

    @classmethod
    def of_this_process(cls) -> Numerics:
        return cls(
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    def apply(self) -> None:
        """Compute like rank 0 from now on; the choice of convolution never depends on a race."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.float32_precision)
        torch.backends.cudnn.allow_tf32 = self.cudnn_allow_tf32
        torch.backends.cudnn.benchmark = False
        set_determinism(self.is_deterministic)


@dataclass(frozen=True)
class Failed:
    """Why a member gave up. It then ends, which ends the others' waiting.

    `error`: its own HyimgError, such as a checkpoint's fault, or a RankError. `at`: the machine's
    clock.
    """

    error: HyimgError
    at: float

    @classmethod
    def by(cls, rank: int, error: BaseException) -> Failed:
        if not isinstance(error, HyimgError):
            what = traceback.format_exception_only(error)[-1].strip()
            code = SHORT if isinstance(error, torch.OutOfMemoryError) else ""
            error = _failed_rank(rank, what, code)
        return cls(error, time.monotonic())


def _failed_rank(rank: int, what: str, code: str = "") -> RankError:
    """Return the error of a member that failed, or ended, while it worked on a task."""
    return RankError(
        f"rank {rank} failed: {what}",
        hint="run the same command again: new ranks are started",
        code=code,
        retryable=True,
    )


class Member:
    """A rank in another process, as rank 0 sees it."""

    def __init__(self, number: int, child: ChildProcess) -> None:
        self.number, self.child = number, child
        self.is_up = self.was_heard = False
        self._why = ""
        self._answers: SimpleQueue[Any] = SimpleQueue()
        child.listen(self._on_message, self._die)

    def receive(self, timeout_s: float) -> Any:
        """Return the next answer. Raises the member's error, RankError if it died or is silent."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Empty:
            raise silence(timeout_s, f"rank {self.number}") from None
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    def fault(self, within_s: float) -> Failed | None:
        """Return this member's fault, None if it has none; answers are skipped."""
        until = time.monotonic() + within_s
        with suppress(Empty):
            while True:
                message = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                if isinstance(message, Failed):
                    return message
        return None

    def kill(self, why: str) -> None:
        """Kill it in any state; callers that wait for it learn why."""
        self._why = why
        self.child.process.kill()

    def _on_message(self, message: Any) -> None:
        if not isinstance(message, Beat):
            self.is_up = True
            self._answers.put(message)
        self.was_heard = self.is_up  # importing torch has its own limit, and delays heartbeats

    def _die(self) -> None:
        """Record that the member is gone, after its last message."""
        why = self._why or self.child.death()
        self._answers.put(Failed(_failed_rank(self.number, why), 0.0))


def watch(members: Sequence[Member], steps: Steps, limits: Limits, over: Event) -> None:
    """Kill members that are stopped, and all of them if their task hangs, until it is `over`.

    `steps` has the tasks. Waiting callers notice a member's death as usual.
    """
    watched, pause_s = StepWatch(limits), min(1.0, limits.silence_s / 10)
    last: dict[Member, float] = {}  # not before the first message: starting has its own limit
    while not over.wait(pause_s):
        now, hangs = steps.clock(), watched.overdue(steps.beat())
        for member in members:
            if member.was_heard:
                member.was_heard, last[member] = False, now
            if hangs or now - last.get(member, now) > limits.silence_s:
                member.kill(hangs or f"no sign of life for {limits.silence_s:.0f} s")


def silence(timeout_s: float, who: str = "a rank") -> RankError:
    """Return the error of a rank that is alive but silent."""
    return RankError(
        f"{who} did not answer within {timeout_s:.0f} s",
        hint="check for a stopped process or a machine that swaps",
        code="rank.timeout",
        retryable=True,
    )


@contextmanager
def loopback() -> Iterator[None]:
    """Form groups inside: gloo then listens on the loopback interface only.

    An aborted group of a GPU does not end the process.
    """
    wanted = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    with restored_environment(*wanted):
        os.environ.update(wanted | os.environ)
        yield
