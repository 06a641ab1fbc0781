"""Run hyimg's own commands in processes of their own, and kill one in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli.files import json_of

# The file to which a run appends a line as each job ends.
_LINES = "results.jsonl"
# Seconds between two looks at it, and for a command without a line until its end is awaited.
_LOOK_S = 0.1


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, seconds, and the JSON lines of its standard output."""

    code: int
    seconds: float
    lines: Sequence[dict[str, Any]] = ()

    def facts(self) -> dict[str, Any]:
        """Return what is recorded of it."""
        return {"exit_code": self.code, "seconds": round(self.seconds, 1)}


@dataclass(frozen=True)
class Kill:
    """A run that was killed after some of its jobs.

    `done`: the digests of the files that it had finished, by job; empty if it ended before.
    """

    seconds: float
    done: dict[str, Any] = field(default_factory=dict)


def call(*words: str, log: Path, shows: bool = False) -> Ended:
    """Run a command of hyimg to its end; what it says goes to `log`.

    `shows`: the user sees it instead, and may answer.
    """
    began = time.monotonic()
    if shows:
        code = subprocess.run(_command(words), check=False).returncode
        return Ended(code, time.monotonic() - began)
    with log.open("ab") as said:
        done = subprocess.run(
            _command(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        )
        said.write(done.stdout)
    return Ended(done.returncode, time.monotonic() - began, _objects(done.stdout))


def killed(*words: str, folder: Path, after: int, log: Path) -> Kill:
    """Start a run into `folder`, and kill it once `after` of its jobs have ended."""
    began = time.monotonic()
    with log.open("ab") as said:
        run = subprocess.Popen(
            _command(words),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            while run.poll() is None and len(finished(folder)) < after:
                time.sleep(_LOOK_S)
            is_killed = run.poll() is None
        finally:
            # The whole group: a run may have processes of its own.
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return Kill(time.monotonic() - began, finished(folder) if is_killed else {})


def finished(folder: Path) -> dict[str, Any]:
    """Return the digests of the files of each job that a run has finished; may be running."""
    try:
        data = (folder / _LINES).read_bytes()
    except OSError:
        return {}
    whole = data[: data.rfind(b"\n") + 1]
    return {
        str(line.get("custom_id")): [one.get("sha256") for one in line.get("outputs") or ()]
        for line in _objects(whole)
        if line.get("status") == "done"
    }


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "hyimg_cli", *words]


def _objects(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        with suppress(ValueError, json.JSONDecodeError):
            one = json_of(line.decode())
            found += [one] if isinstance(one, dict) else []
    return found
