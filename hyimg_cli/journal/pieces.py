"""Pieces of a run that several processes write at the same time, each with its lock and journal.

    OUT/pieces/  0007.lock   0007.jsonl     held and written by one process at a time
                 0007.begun                 the jobs that it has begun, and deaths at them
                 died-TOKEN                 how a process died, written by the one that started it
                 plan.json                  who began them

The system frees the lock of a process that dies. Whoever takes the piece next finds the lines of
the jobs that ended. A job that was begun and has no line is suspect if its process died alone: if
the whole command was killed, nobody writes how the process died.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any

from hyimg_cli.errors import HyimgError
from hyimg_cli.files import json_of
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.spec.events import Outcome

# Seconds to wait until the command of a process tells how it died.
_DEATH_NOTE_S = 10.0


class BegunJobs:
    """The jobs of a piece that its process has begun; read and written by who holds the piece."""

    def __init__(self, folder: RunFolder, process: str, ended: set[str]) -> None:
        """Read what an earlier process left; `process`: this one's token; `ended`: jobs with lines.

        May wait until it is known how the earlier process died.
        """
        self._folder, self._process, self._ended = folder, process, ended
        self._jobs = list[str]()
        found = _read(folder, folder.piece or 0)
        # How processes died at a job, by custom_id.
        self.deaths: dict[str, list[str]] = found.get("deaths", {})
        suspects = [name for name in found.get("jobs", ()) if name not in ended]
        if suspects and (how := _wait_for_death_note(folder, found.get("by", ""))):
            for name in suspects:
                self.deaths.setdefault(name, []).append(how)
        if found:
            self._write()

    def begin(self, custom_id: str) -> None:
        """Note a job before its work begins."""
        self._jobs = [name for name in self._jobs if name not in self._ended]
        self._jobs.append(custom_id)
        self._write()

    def end(self, custom_id: str) -> None:
        """Take a job whose line is on disk out of the next note."""
        self._ended.add(custom_id)

    def clear(self) -> None:
        """Note that nothing is at work any more."""
        self._jobs = []
        self._write()

    def _write(self) -> None:
        data = {"by": self._process, "jobs": self._jobs, "deaths": self.deaths}
        self._folder.write_note(_begun_name(self._folder.piece or 0), json.dumps(data).encode())


def begun_jobs(folder: RunFolder, pieces: int) -> dict[str, list[str]]:
    """Return the jobs that each process has begun, with those that have ended since."""
    found: dict[str, list[str]] = {}
    for one in (_read(folder, number) for number in range(pieces)):
        found.setdefault(one.get("by", ""), []).extend(one.get("jobs", ()))
    return found


def note_death(folder: RunFolder, process: str, how: str) -> None:
    """Tell others how a process died, for jobs that it had begun."""
    folder.write_note(f"died-{process}", how.encode())


def _wait_for_death_note(folder: RunFolder, process: str) -> str:
    until = time.monotonic() + _DEATH_NOTE_S
    while not (how := folder.read_note(f"died-{process}")):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return how.decode()


def _begun_name(piece: int) -> str:
    return f"{piece:04}.begun"


def _read(folder: RunFolder, piece: int) -> dict[str, Any]:
    with suppress(ValueError, HyimgError):
        return dict(json_of(folder.read_note(_begun_name(piece))))
    return {}


def outcome_of(entry: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a result line that this version wrote."""
    known = {one.name for one in fields(Outcome)}
    values = {name: value for name, value in entry.items() if name in known}
    extra = {name: value for name, value in entry.items() if name not in known}
    outcome: Outcome = _adapter().validate_python(values | {"extra": extra})
    return outcome


@cache
def _adapter() -> Any:
    """Return pydantic's builder of outcomes; only made when needed, because it takes a while."""
    from pydantic import TypeAdapter

    return TypeAdapter(Outcome)
