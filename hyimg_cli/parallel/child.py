"""The process that started this one, seen from here; no torch.

`python -m MODULE LINE BEAT_S PARENT`, by `launch.launched`: the line's descriptor, how often to
tell that this process goes on, and whom it is tied to. The line is read by a thread, so that its
end ends this process, whatever it computes. Signals for stopping are the parent's to answer.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from hyimg_cli.parallel.launch import packed, tie_to
from hyimg_cli.parallel.watch import Beat


class Parent:
    """The line to the process that started this one; its end, in either direction, ends this."""

    def __init__(
        self,
        arguments: Sequence[str],
        heard: Callable[[bytes], None],
        beat: Callable[[], object] = Beat,
    ) -> None:
        """`arguments` of the command; `heard` is given every message, packed, in a thread of its
        own. `beat` makes what is told now and then.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        line, beat_s, parent = arguments
        tie_to(int(parent))
        self._line, self._turn = Connection(int(line)), threading.Lock()
        threading.Thread(target=self._read, args=(heard,), daemon=True).start()
        threading.Thread(target=self._beat, args=(beat, float(beat_s)), daemon=True).start()

    def send(self, message: object) -> None:
        data = packed(message)
        try:
            with self._turn:
                self._line.send_bytes(data)
        except OSError:
            os._exit(0)

    def _read(self, heard: Callable[[bytes], None]) -> None:
        try:
            while True:
                heard(self._line.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # a message that is not understood
            traceback.print_exc()
            os._exit(1)

    def _beat(self, beat: Callable[[], object], beat_s: float) -> None:
        while True:
            self.send(beat())
            time.sleep(beat_s)
