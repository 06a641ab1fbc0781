"""A process of ours beside this one, and a line to it; no torch.

Its side of the line is `child.Parent`: it ends when the line does, so it never outlives this
process; nor does one that is stopped, from its first moment on. Both directions have a thread here:
who is stopped, or slow, holds nobody up.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hyimg_cli.parallel.watch import BEAT_S

_NOTHING: Mapping[str, str] = {}
_END_S = 5.0
# Tied to this process before it imports anything that takes its time.
_FIRST = (
    "import sys; from hyimg_cli.parallel.tie import tie_to; tie_to(int(sys.argv.pop())); "
    "from hyimg_cli.parallel.child import main; main()"
)


@dataclass(frozen=True, eq=False)
class Launched:
    """A process that was started, and our end of the line to it."""

    process: subprocess.Popen[bytes]
    _line: socket.socket
    _outbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    def listen(self, heard: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Have a thread hand over every message, and tell when there will be none any more."""
        reading, writing = (Connection(os.dup(self._line.fileno())) for _ in range(2))
        threading.Thread(target=self._read, args=(reading, heard, ended), daemon=True).start()
        threading.Thread(target=self._write, args=(writing,), daemon=True).start()

    def post(self, message: bytes) -> None:
        """Send a message of `packed`, at once or when there is room; nobody waits for that."""
        self._outbox.put(message)

    def hang_up(self) -> None:
        """End the line, and with it a process that listens."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Hang up; kill a process that does not listen."""
        self.hang_up()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._line.close()

    def death(self) -> str:
        """How a process died that has ended its line, as the system tells it."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"

    def _read(
        self, line: Connection, heard: Callable[[Any], None], ended: Callable[[], None]
    ) -> None:
        try:
            with line, suppress(EOFError, OSError):
                while True:
                    heard(pickle.loads(line.recv_bytes()))
        finally:  # also where a message is not understood
            self._outbox.put(None)
            ended()

    def _write(self, line: Connection) -> None:
        with line, suppress(OSError):
            while (message := self._outbox.get()) is not None:
                line.send_bytes(message)


def packed(message: object) -> bytes:
    """By plain `pickle`: functions go by name, all else by value."""
    return pickle.dumps(message)


def launched(
    module: str, environment: Mapping[str, str] = _NOTHING, beat_s: float = BEAT_S
) -> Launched:
    """A process that calls `main` of a module with its `child.Parent`. It has this process's search
    path; `environment` adds to ours.

    It has no standard input and output: its messages go through the line, its log to stderr. It
    tells that it goes on every `beat_s`, from before it imports the module.
    """
    ours, theirs = socket.socketpair()
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    # A thread that ends would take with it what is tied to it.
    tied = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    process = subprocess.Popen(
        [sys.executable, "-c", _FIRST, module, str(theirs.fileno()), str(beat_s), str(tied)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A terminal's Ctrl-C is for this process, from the other's first moment on. Should this one
        # end, the system hangs up on such a group where it is stopped.
        process_group=0,
        env={**os.environ, **path, **environment},
    )
    theirs.close()
    return Launched(process, ours)
