"""The output and error files of a batch, made as they are read: from its manifest, the journal of
its run and the pictures there. No more than one line of them is in memory.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from hyimg_cli.files import opened
from hyimg_cli.journal.journal import RunFolder, find_last, json_line
from hyimg_cli.journal.journal_file import entry_of
from hyimg_cli.manifest.line import child_ids
from hyimg_cli.serve.errors import Refused, error_body
from hyimg_cli.serve.intake import MANIFEST
from hyimg_cli.serve.wire import body_of, failed_body
from hyimg_cli.spec import digest

RUN = "run"
Kind = Literal["output", "error"]
KINDS: tuple[Kind, ...] = ("output", "error")
# What is said of requests that never ran, by what became of their batch.
_NEVER_RAN = {
    "expired": ("batch_expired", "the batch expired before this request was executed"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was executed"),
}
_LOST = ("batch_incomplete", "the journal of the batch has no result of this request")

Picture = Callable[[Mapping[str, Any]], dict[str, Any]]


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a batch's manifest; none where its input was never read."""
    if (folder / MANIFEST).is_file():
        with opened(folder / MANIFEST) as file:
            for raw in file:
                if raw.strip():
                    yield json.loads(raw)


class Journal:
    """Where each job's last line is in the journals of a run; the lines stay on the disk."""

    def __init__(self, run: Path) -> None:
        # By job: where its line is, and whether that says done.
        self._ends = find_last(map(_ends_in, RunFolder(run).journals()))

    def is_done(self, job: str) -> bool | None:
        """True for a job that is done, False for one that failed, None for one that never ran."""
        return self._ends[job][2] if job in self._ends else None

    def entry(self, job: str) -> dict[str, Any]:
        """A job's result line."""
        path, start, _ = self._ends[job]
        with opened(path) as file:
            file.seek(start)
            entry: dict[str, Any] = json.loads(file.readline())
            return entry


def _ends_in(journal: Path) -> Iterator[tuple[dict[str, Any], tuple[Path, int, bool]]]:
    """Its outcomes, each with its place and whether it says done."""
    start = 0
    with opened(journal) as file:
        for raw in file:
            if (entry := entry_of(raw)) is not None:  # else a kill cut it off
                yield entry, (journal, start, entry["status"] == "done")
            start += len(raw)


class Answers:
    """What a batch answers, line by line. `record` is its batch.json, `status` how it ends."""

    def __init__(self, folder: Path, record: Mapping[str, Any], status: str) -> None:
        self._folder, self._record = folder, record
        self._never_ran = _NEVER_RAN.get(status, _LOST)
        self._journal = Journal(folder / RUN)
        self._created = record.get("in_progress_at") or record["created_at"]

    def nbytes(self, kind: Kind) -> int:
        """The size of a file, for which no picture is read."""
        nbytes = 0

        def weigh(output: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal nbytes
            nbytes += 4 * -(-self._path_of(output).stat().st_size // 3)
            return {"b64_json": ""}

        return sum(map(len, self._lines(kind, weigh))) + nbytes

    def read(self, kind: Kind) -> Iterator[bytes]:
        """The lines of a file."""
        return self._lines(kind, self._picture)

    def _lines(self, kind: Kind, picture: Picture) -> Iterator[bytes]:
        for line in lines_of(self._folder):
            jobs = child_ids(line)
            ends = [self._journal.is_done(job) for job in jobs]
            if all(ends) != (kind == "output"):
                continue
            name = line["custom_id"]
            asked = digest.of_json([self._record["id"], name])[:24]
            answer = {"id": f"batch_req_{asked}", "custom_id": name}
            if None in ends and False not in ends:
                code, message = self._never_ran
                error = {"code": code, "message": message}
                yield json_line(answer | {"response": None, "error": error})
                continue
            status, body = self._answer(line, jobs, picture)
            response = {"status_code": status, "request_id": f"req_{asked}", "body": body}
            yield json_line(answer | {"response": response, "error": None})

    def _answer(
        self, line: dict[str, Any], jobs: list[str], picture: Picture
    ) -> tuple[int, dict[str, Any]]:
        """A request's status and body; beside the error of one job the pictures of the others."""
        if line.get("x_response_format") == "url":
            picture = self._address
        ended = [job for job in jobs if self._journal.is_done(job) is not None]
        entries = [self._journal.entry(job) for job in ended]
        asked = line, entries, picture, self._created
        try:
            if all(entry["status"] == "done" for entry in entries):
                return 200, body_of(*asked)
            for entry in entries:
                if error := entry["error"]:  # which may say where the server keeps a picture
                    error["message"] = error["message"].replace(f"{self._folder}/", "")
            return failed_body(*asked)
        except Refused as error:  # a picture is gone
            return error.status, error_body(error)

    def _address(self, output: Mapping[str, Any]) -> dict[str, Any]:
        base, name = self._record["base_url"], quote(output["path"])
        return {"url": f"{base}/batches/{self._record['id']}/{name}"}

    def _picture(self, output: Mapping[str, Any]) -> dict[str, Any]:
        data = self._path_of(output).read_bytes()
        if digest.of_bytes(data) != output["sha256"]:
            raise _gone(f"{output['path']} is not as it was written")
        return {"b64_json": base64.b64encode(data).decode()}

    def _path_of(self, output: Mapping[str, Any]) -> Path:
        path: Path = self._folder / RUN / output["path"]
        if not path.is_file():
            raise _gone(f"{output['path']} is gone from the server's disk")
        return path


def _gone(what: str) -> Refused:
    return Refused(410, what, hint="send the request again", code="output.gone")
