"""Result lines as responses: the body that answers a request, and the files of a batch.

A batch's output and error files are made as they are read, from its manifest, the journal of its
run and the pictures there. One line of them is in memory at a time.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from hyimg_cli.files import bytes_of, opened
from hyimg_cli.journal.journal import RunFolder, find_last, json_line
from hyimg_cli.journal.journal_file import entry_of
from hyimg_cli.manifest.line import child_ids
from hyimg_cli.serve.errors import Refused, refusal_of
from hyimg_cli.spec import digest

MANIFEST, RUN = "manifest.jsonl", "run"
Kind = Literal["output", "error"]
KINDS: tuple[Kind, ...] = ("output", "error")
_PICTURE_BYTES = 200_000_000
# Errors of requests that never ran, by the status of their batch.
_NEVER_RAN = {
    "expired": ("batch_expired", "the batch expired before this request was executed"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was executed"),
}
_LOST = ("batch_incomplete", "the journal of the batch has no result of this request")

Picture = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Pictures:
    """The pictures of a run folder; `address` is the URL under which its files are served."""

    folder: Path
    address: str

    def url(self, output: Mapping[str, Any]) -> dict[str, Any]:
        return {"url": f"{self.address}/{quote(output['path'])}"}

    def data(self, output: Mapping[str, Any]) -> dict[str, Any]:
        data = bytes_of(self.path_of(output), _PICTURE_BYTES)
        if digest.of_bytes(data) != output["sha256"]:
            raise _gone(f"{output['path']} was changed on the server's disk")
        return {"b64_json": base64.b64encode(data).decode()}

    def path_of(self, output: Mapping[str, Any]) -> Path:
        """Where a picture is. Raises Refused where somebody removed it."""
        path: Path = self.folder / output["path"]
        if not path.is_file():
            raise _gone(f"{output['path']} is gone from the server's disk")
        return path


def respond(
    line: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    pictures: Pictures,
    created: int,
    encode: Picture | None = None,
) -> dict[str, Any]:
    """The body that answers a line of a manifest, by the result lines of its jobs in order.

    `encode`: how a picture is given in `b64_json`. Raises Refused where a job failed, with the
    pictures of the others, and where a picture is gone.
    """
    encode = pictures.url if line.get("x_response_format") == "url" else encode or pictures.data
    outputs = [(entry, output) for entry in entries for output in entry["outputs"]]
    data = [{**encode(output), "revised_prompt": one.get("cot_text")} for one, output in outputs]
    if failed := [entry["error"] for entry in entries if entry["status"] != "done"]:
        message = failed[0]["message"]
        # An error may name a file of the server.
        names = {path: f"image {n}" for n, path in enumerate(line.get("images", ()), 1)}
        if isinstance(region := line.get("region"), str):
            names[region] = "the mask"
        for path, name in names.items():
            message = message.replace(str(pictures.folder.parent / path), name)
        message = message.replace(f"{pictures.folder.parent}/", "")
        refused = refusal_of({**failed[0], "message": message})
        refused.data = data
        raise refused
    own = [
        {name: output[name] for name in ("seed", "pixel_sha256")} | {"warnings": entry["warnings"]}
        for entry, output in outputs
    ]
    sizes = {f"{output['width']}x{output['height']}" for _, output in outputs}
    suffix = outputs[0][1]["path"].rpartition(".")[2]
    return {
        "created": created,
        "data": data,
        "size": sizes.pop() if len(sizes) == 1 else "auto",
        "quality": "auto",
        "background": "opaque",
        "output_format": "jpeg" if suffix == "jpg" else suffix,
        "usage": _usage(entries, has_images="images" in line),
        "hyimg": own,
    }


def _usage(entries: Sequence[Mapping[str, Any]], *, has_images: bool) -> dict[str, Any]:
    """Tokens that were read, prompt and pictures together, and tokens that were written."""
    reuse = [entry.get("kv_reuse") or {} for entry in entries]
    read = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("prefill", "shared"))
    wrote = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("decode", "taken"))
    kinds = {"text_tokens": 0 if has_images else read, "image_tokens": read if has_images else 0}
    total = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
    return total | {"input_tokens_details": kinds}


class BatchResults:
    """What became of a batch's requests; result lines and pictures stay on the disk.

    `is_done` says of each job that ended whether it was done: by the journal, and of a batch at
    work by what its run tells.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = {line["custom_id"]: child_ids(line) for line in _lines_of(folder)}
        self._places = find_last(map(_places_in, RunFolder(folder / RUN).journals()))
        self.is_done = {job: is_done for job, (_, _, is_done) in self._places.items()}

    def counts(self) -> dict[str, int]:
        """How many requests have ended, and how: a request ends with the last of its jobs."""
        ends = Counter[bool]()
        for jobs in self._jobs.values():
            of_jobs = [self.is_done.get(job) for job in jobs]
            if None not in of_jobs:
                ends[all(of_jobs)] += 1
        return {"total": len(self._jobs), "completed": ends[True], "failed": ends[False]}

    def nbytes(self, kind: Kind, record: Mapping[str, Any], status: str) -> int:
        """The size of a file, for which no picture is read."""
        nbytes, pictures = 0, Pictures(self._folder / RUN, "")

        def weigh(output: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal nbytes
            nbytes += 4 * -(-pictures.path_of(output).stat().st_size // 3)
            return {"b64_json": ""}

        return sum(map(len, self.lines(kind, record, status, weigh))) + nbytes

    def lines(
        self, kind: Kind, record: Mapping[str, Any], status: str, encode: Picture | None = None
    ) -> Iterator[bytes]:
        """The lines of a file. `record` is the batch's, `status` how it ended or ends."""
        pictures = Pictures(self._folder / RUN, f"{record['base_url']}/batches/{record['id']}")
        created = record.get("in_progress_at") or record["created_at"]
        for line in _lines_of(self._folder):
            jobs = self._jobs[line["custom_id"]]
            ends = [self.is_done.get(job) for job in jobs]
            if all(ends) != (kind == "output"):
                continue
            asked = digest.of_json([record["id"], line["custom_id"]])[:24]
            answer = {"id": f"batch_req_{asked}", "custom_id": line["custom_id"]}
            if None in ends and False not in ends:
                code, message = _NEVER_RAN.get(status, _LOST)
                error = {"code": code, "message": message}
                yield json_line(answer | {"response": None, "error": error})
                continue
            entries = [self._entry(job) for job in jobs if job in self._places]
            try:
                status_code, body = 200, respond(line, entries, pictures, created, encode)
            except Refused as refused:
                status_code, body = refused.status, refused.body()
            response = {"status_code": status_code, "request_id": f"req_{asked}", "body": body}
            yield json_line(answer | {"response": response, "error": None})

    def _entry(self, job: str) -> dict[str, Any]:
        """A job's result line."""
        path, start, _ = self._places[job]
        with opened(path) as file:
            file.seek(start)
            entry: dict[str, Any] = json.loads(file.readline())
            return entry


def _lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a batch's manifest; none where its input was never read."""
    if (folder / MANIFEST).is_file():
        with opened(folder / MANIFEST) as file:
            for raw in file:
                if raw.strip():
                    yield json.loads(raw)


def _places_in(journal: Path) -> Iterator[tuple[dict[str, Any], tuple[Path, int, bool]]]:
    """Its outcomes, each with its place and whether it says done."""
    start = 0
    with opened(journal) as file:
        for raw in file:
            if (entry := entry_of(raw)) is not None:  # else a kill cut it off
                yield entry, (journal, start, entry["status"] == "done")
            start += len(raw)


def _gone(what: str) -> Refused:
    return Refused(410, what, hint="send the request again", code="output.gone")
