"""Launch a process, and hold both ends of the line to it; no torch.

A launched process ends when its line does, so it never outlives this one, even if it is stopped at
its very start. Threads read and write each end of the line, so a stopped or slow process delays no
other.
"""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hyimg_cli.parallel.watch import BEAT_S, Beat
from hyimg_cli.spec.gc_paused import gc_paused

_END_S = 5.0


class ChildProcess:
    """A process that calls `main` of a module with its `Parent`, and this end of the line to it."""

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, beat_s: float = BEAT_S
    ) -> None:
        """Start `module` with this process's search path and no standard input or output.

        `environment` adds to ours. Messages go through the line, the log to stderr. The child
        reports every `beat_s` that it is alive, from before it imports the module.
        """
        self._line, theirs = socket.socketpair()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        # A thread that ends would end the processes tied to it.
        tied = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        start = "from hyimg_cli.parallel.launch import run_child; run_child()"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, module, str(theirs.fileno()), str(beat_s), str(tied)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A terminal's Ctrl-C is meant for this process only, from the child's start on. If
                # this process ends, the system sends a hang-up to a group that is stopped.
                process_group=0,
                env={**os.environ, **path, **(environment or {})},
            )

    def listen(self, heard: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Start a thread that delivers every message, and reports the end of the line."""
        reading, writing = (Connection(os.dup(self._line.fileno())) for _ in range(2))
        threading.Thread(target=self._read, args=(reading, heard, ended), daemon=True).start()
        threading.Thread(target=self._write, args=(writing,), daemon=True).start()

    def post(self, message: object) -> None:
        """Send a message without waiting. It is pickled now; functions by name, else by value."""
        self._outbox.put(pickle.dumps(message))

    def hang_up(self) -> None:
        """Close the line, which ends a process that listens."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def terminate(self) -> None:
        """Hang up; kill a process that does not listen."""
        self.hang_up()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._line.close()

    def death(self) -> str:
        """Return how a process that closed its line died, as the system reports it."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _read(
        self, line: Connection, heard: Callable[[Any], None], ended: Callable[[], None]
    ) -> None:
        try:
            with line, suppress(EOFError, OSError):
                while True:
                    heard(pickle.loads(line.recv_bytes()))
        finally:  # also if a message is not understood
            self._outbox.put(None)
            ended()

    def _write(self, line: Connection) -> None:
        with line, suppress(OSError):
            while (message := self._outbox.get()) is not None:
                line.send_bytes(message)


def run_child() -> None:
    """In a launched process: call a module's `main` with the parent."""
    module, line, beat_s, tied = sys.argv[1:]
    tie_to(int(tied))  # before any slow import
    parent = Parent(int(line), float(beat_s))
    with gc_paused():
        imported = import_module(module)
    imported.main(parent)


def tie_to(parent: int) -> None:
    """Make the system end this process with `parent`, even if it is stopped and reads no line.

    On Linux only; does nothing for 0.
    """
    if sys.platform == "linux" and parent:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


class Parent:
    """The line to the parent process; if either end closes, this process ends.

    Signals for stopping go to the parent. `inbox`: its messages, packed, unless `heard` is set to a
    callback, which runs in its own thread. `beat` makes the regular report.
    """

    def __init__(self, line: int, beat_s: float) -> None:
        # In the background of the terminal, writing to the log must not stop it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.heard: Callable[[bytes], None] = self.inbox.put
        self.beat: Callable[[], object] = Beat
        self._line, self._turn = Connection(line), threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(beat_s,), daemon=True).start()

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        try:
            with self._turn:
                self._line.send_bytes(data)
        except OSError:
            os._exit(0)

    def _read(self) -> None:
        try:
            while True:
                data = self._line.recv_bytes()
                self.heard(data)  # the current value
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # a message that is not understood
            traceback.print_exc()
            os._exit(1)

    def _beat(self, beat_s: float) -> None:
        while True:
            self.send(self.beat())
            time.sleep(beat_s)
