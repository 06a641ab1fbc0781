"""Read the record of any file that hyimg wrote; of an answer, from the results of its run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.journal.journal import outputs_of
from hyimg_cli.journal.past_run import past_jobs
from hyimg_cli.measure.replay.run_folder import run_of
from hyimg_cli.media.recorded import (
    Described,
    read_described,
    record_fault,
    record_in,
    start_of,
)
from hyimg_cli.media.source_files import MAX_SOURCE_BYTES
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import ANSWER_SUFFIX

_OF_ANSWER = (
    "answer",
    "answer_token_ids",
    "finish",
    "choices",
    "mass",
    "thought",
    "confidence",
    "source_sha256",
)
_IN_ITS_RUN = "an answer is read in the folder of its run, next to results.jsonl"


class Records:
    """Reads records of files; the results of a run are read once."""

    def __init__(self) -> None:
        # The result lines of runs, each with its file's digest, by run folder and file.
        self._lines: dict[Path, dict[str, tuple[str, Mapping[str, Any]]]] = {}

    def read(self, path: Path) -> Described:
        """Return the record of a file, as `read_described` does, and of an answer too.

        Raises UsageError as there, and if no result line has the answer as it is in the file.
        """
        if path.suffix != ANSWER_SUFFIX:
            return read_described(path)
        start_of(path)
        # Not resolved: the line has the name by which the folder is known.
        place = Path(os.path.abspath(path))
        run = run_of(place)
        if run not in self._lines:
            self._lines[run] = {
                str(output["path"]): (str(output.get("sha256")), job.result)
                for job in past_jobs(run)
                for output in outputs_of(job.result)
            }
        sha256, line = self._lines[run].get(place.relative_to(run).as_posix(), ("", {}))
        if not sha256:
            raise record_fault("none", "no run has this answer", path, _IN_ITS_RUN)
        if digest.of_file(path, MAX_SOURCE_BYTES) != sha256:
            what = "the answer was changed after it was written"
            raise record_fault("none", what, path, "run the same command again to write it again")
        if not line.get("record"):
            what = "the answer has no record of how it was made"
            hint = "its run was made with --no-metadata, or by an earlier version"
            raise record_fault("none", what, path, hint)
        facts = {name: line[name] for name in _OF_ANSWER if line.get(name) is not None}
        record = record_in({**line["record"], **facts}, path, _IN_ITS_RUN)
        return Described(path, "answer", record)
