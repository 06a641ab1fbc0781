"""The process that started this one, seen from here; no torch.

`main` is called by what `launch.launched` starts: MODULE LINE BEAT_S, the line's descriptor and how
often to tell that this process goes on. The line is read by a thread, so that its end ends this
process, whatever it imports or computes. Signals for stopping are the parent's to answer.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue

from hyimg_cli.parallel.launch import packed
from hyimg_cli.parallel.watch import Beat
from hyimg_cli.spec.gc_paused import gc_paused


def main() -> None:
    """Have a module do the work: its `main` is given the parent."""
    module, line, beat_s = sys.argv[1:]
    parent = Parent(int(line), float(beat_s))
    with gc_paused():
        imported = import_module(module)
    imported.main(parent)


class Parent:
    """The line to the process that started this one; its end, in either direction, ends this.

    `inbox`: what it said, packed, unless `heard` is set to something that is given it instead, in
    a thread of its own. `beat` makes what is told now and then.
    """

    def __init__(self, line: int, beat_s: float) -> None:
        # Out of the terminal's foreground, it is not to stop for a line of its log.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.heard: Callable[[bytes], None] = self.inbox.put
        self.beat: Callable[[], object] = Beat
        self._line, self._turn = Connection(line), threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(beat_s,), daemon=True).start()

    def send(self, message: object) -> None:
        data = packed(message)
        try:
            with self._turn:
                self._line.send_bytes(data)
        except OSError:
            os._exit(0)

    def _read(self) -> None:
        try:
            while True:
                data = self._line.recv_bytes()
                self.heard(data)  # as it is by now
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # a message that is not understood
            traceback.print_exc()
            os._exit(1)

    def _beat(self, beat_s: float) -> None:
        while True:
            self.send(self.beat())
            time.sleep(beat_s)
