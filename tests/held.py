"""The command as a process that pauses after its first results, until a test lets it continue.
So a test can act on it during its work, however slow the machine is.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

WAIT_S = 240
# A result is written before the next event, and so is there when the process holds.
_PROGRAM = """
import sys, time
from pathlib import Path
from hyimg_cli.cli.app import run
from hyimg_cli.engine.session import Session
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.spec.events import JobEnded

hold, results = Path(sys.argv[1]), int(sys.argv[2])
events_of, finished = Session.run, WriteBehind.finished

def held(session, *arguments):
    done = 0
    for event in events_of(session, *arguments):
        yield event
        done += isinstance(event, JobEnded) and event.is_done
        while done == results and hold.exists():
            time.sleep(0.01)

Session.run = held
WriteBehind.finished = lambda behind, *, wait: finished(behind, wait=True)
sys.exit(run(sys.argv[3:]))
"""


class Held(subprocess.Popen[str]):
    """`hyimg …` in a folder; it holds behind so many results."""

    def __init__(self, folder: Path, *words: str, results: int = 1) -> None:
        self._hold = folder / ".hold"
        self._hold.touch()
        command = [sys.executable, "-c", _PROGRAM, str(self._hold), str(results), *words]
        pipe = subprocess.PIPE
        super().__init__(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Fails where the process ends before."""
        end = time.monotonic() + WAIT_S
        while not is_there():
            if self.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"it never held: {self.communicate()}")
            time.sleep(0.02)

    def go_on(self) -> None:
        self._hold.unlink()

    def ended(self) -> tuple[str, str]:
        """Its standard output and error, once it has ended."""
        try:
            return self.communicate(timeout=WAIT_S)
        finally:
            self.kill()
