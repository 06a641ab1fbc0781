"""A process of ours beside this one, with a pipe to it; no torch.

It is told the pipe's descriptor and ends when the pipe does, so it never outlives this process.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_NOTHING: Mapping[str, str] = {}
_END_S = 5.0


@dataclass(frozen=True, eq=False)
class Launched:
    """A process that was started, and our end of the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    def end(self) -> None:
        """Close the pipe, which ends a process that listens; kill one that does not."""
        self.pipe.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def death(self) -> str:
        """How a process died that has closed its pipe, as the system tells it."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"


def send(pipe: Connection, message: object) -> None:
    """By plain `pickle`: functions go by name, all else by value. Raises OSError where nobody is
    left to read.
    """
    pipe.send_bytes(pickle.dumps(message))


def received(pipe: Connection) -> Any:
    """The next message. Raises EOFError or OSError at the pipe's end."""
    return pickle.loads(pipe.recv_bytes())


def launched(module: str, environment: Mapping[str, str] = _NOTHING) -> Launched:
    """`python -m module FD` with this process's search path; `environment` adds to ours.

    It has no standard input and output: its messages go through the pipe, its log to stderr.
    """
    ours, theirs = Pipe()
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A terminal's Ctrl-C is for this process, from the other's first moment on.
        start_new_session=True,
        env={**os.environ, **path, **environment},
    )
    theirs.close()
    return Launched(process, ours)
