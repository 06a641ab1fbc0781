"""A process of ours beside this one, with a pipe to it; no torch.

It is told the pipe's descriptor and ends when the pipe does, so it never outlives this process.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Launched:
    """A process that was started, and our end of the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection


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
