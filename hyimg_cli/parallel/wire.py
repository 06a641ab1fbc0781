"""What goes through the pipe between rank 0 and a member, and the member as rank 0 sees it.

Pickled by plain `pickle`: functions go by name, tensors among the arguments by value.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from hyimg_cli.errors import HyimgError, RankError

if TYPE_CHECKING:
    from hyimg_cli.parallel.ranks import Rank

_END_S = 5.0


@dataclass(frozen=True)
class Numerics:
    """Settings of torch that change the last bits; members take over rank 0's."""

    threads: int
    float32_precision: str
    cudnn_allow_tf32: bool

    @classmethod
    def of_this_process(cls) -> Numerics:
        return cls(
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
        )

    def apply(self) -> None:
        """Compute from now on as rank 0 does; which convolution is used never depends on a race."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.float32_precision)
        torch.backends.cudnn.allow_tf32 = self.cudnn_allow_tf32
        torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class Join:
    """Where the group meets, who the member is there, and how it computes."""

    store: str
    rank: Rank
    numerics: Numerics

    def for_rank(self, number: int, device: torch.device) -> Join:
        """The same for a member."""
        return replace(self, rank=replace(self.rank, number=number, device=device, parts={}))


@dataclass(frozen=True)
class Task:
    """A function of a module, to be called with the rank first."""

    work: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def packed(self) -> bytes:
        return pickle.dumps(self)

    def called(self, rank: Rank) -> Any:
        """Do it, on this rank."""
        return self.work(rank, *self.args)


@dataclass(frozen=True)
class Answer:
    """What a task returned."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """Why a member gave up: it says so, ends, and its silence ends the others' waiting.

    `at`: the machine's monotonic clock. `error` where it is one of ours.
    """

    rank: int
    what: str
    at: float
    error: HyimgError | None = None

    @classmethod
    def by(cls, rank: int, error: BaseException) -> Failed:
        ours = error if isinstance(error, HyimgError) else None
        what = traceback.format_exception_only(error)[-1].strip()
        return cls(rank, what, time.monotonic(), ours)

    def as_rank_error(self) -> RankError:
        return RankError(
            f"rank {self.rank} failed: {self.what}",
            hint="run the same command again; the ranks start anew",
            retryable=True,
        )

    def as_error(self) -> HyimgError:
        """The member's own error where it is one of ours: a checkpoint's fault stays one."""
        return self.error or self.as_rank_error()


@dataclass
class Member:
    """A rank in another process: its pipe, and whether it still lives."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: Connection

    def send(self, message: object) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        """Raises RankError where nobody is left to read."""
        try:
            self.pipe.send_bytes(data)
        except OSError:
            raise self._death().as_rank_error() from None

    def receive(self, timeout_s: float) -> Any:
        """The next message; a `Failed` too. Raises RankError where it died or says nothing."""
        if not self.pipe.poll(timeout_s):
            raise silence(timeout_s, f"rank {self.number}")
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death().as_rank_error() from None

    def fault(self, within_s: float) -> Failed | None:
        """What went wrong in this member, None where it is well; answers are passed over."""
        until = time.monotonic() + within_s
        while self.pipe.poll(max(0.0, until - time.monotonic())):
            try:
                message = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                return self._death()
            if isinstance(message, Failed):
                return message
        return None

    def end(self) -> None:
        """Close the pipe, which ends a member that listens; kill one that does not."""
        self.pipe.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _death(self) -> Failed:
        """The member is gone without a word; how, as the system tells it."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return Failed(self.number, "it closed its pipe", 0.0)
        how = f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"
        return Failed(self.number, how, 0.0)


def silence(timeout_s: float, who: str = "a rank") -> RankError:
    """The error where a rank lives but says nothing."""
    return RankError(
        f"{who} has not answered for {timeout_s:.0f} s",
        hint="look for a process that is stopped, or a machine that swaps",
        code="rank.timeout",
        retryable=True,
    )


@contextmanager
def loopback() -> Iterator[None]:
    """gloo listens on this machine's own interface alone, whatever its host name leads to.

    A GPU's group is not to end the whole process when it is aborted.
    """
    wanted = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
