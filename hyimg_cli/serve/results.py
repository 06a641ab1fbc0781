"""Result lines as responses: bodies that answer requests, and output files of batches.

A batch's output and error files are made as they are read, from its manifest, its run's journal and
the pictures. Only one line of them is in memory at a time.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hyimg_cli.files import bytes_of, opened
from hyimg_cli.journal.journal import RunFolder, find_last, json_line
from hyimg_cli.journal.journal_file import entry_of
from hyimg_cli.manifest.ids import child_ids
from hyimg_cli.serve.chat import completion
from hyimg_cli.serve.errors import Refused, refusal_of
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import TEXT_TASKS

MANIFEST, RUN = "manifest.jsonl", "run"
KINDS = ("output", "error")
# A request's custom_id, if it cannot name a job: the line then has an id made from it.
REQUEST_ID = "x_custom_id"
_PICTURE_BYTES = 200_000_000
# Errors of requests that never ran, by the status of their batch.
_NEVER_RAN = {
    "expired": ("batch_expired", "the batch expired before this request was executed"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was executed"),
}
_LOST = ("batch_incomplete", "the batch's journal has no result of this request")


def respond(
    line: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    run: Path,
    url: str,
    created: int,
    *,
    is_event: bool = False,
) -> dict[str, Any]:
    """Return the body that answers a manifest line, from the result lines of its jobs in order.

    `run` is their run folder, `url` its address. An event of a stream always has the picture's
    bytes. Raises Refused if a job failed, with the pictures of the others, and if a picture was
    removed.
    """
    outputs = [(entry, output) for entry in entries for output in entry["outputs"]]

    def shown(output: Mapping[str, Any]) -> dict[str, Any]:
        by_url = line.get("x_response_format") == "url"
        found = {"url": f"{url}/{quote(output['path'])}"} if by_url else {}
        return found if by_url and not is_event else found | {"b64_json": _base64(run, output)}

    is_chat = line.get("task") in TEXT_TASKS
    data = []
    if not is_chat:
        data = [shown(output) | {"revised_prompt": one.get("cot_text")} for one, output in outputs]
    if failed := [entry["error"] for entry in entries if entry["status"] != "done"]:
        message = failed[0]["message"]
        # An error may name a file of the server.
        names = {path: f"image {n}" for n, path in enumerate(line.get("images", ()), 1)}
        if isinstance(region := line.get("region"), str):
            names[region] = "the mask"
        for path, name in names.items():
            message = message.replace(str(run.parent / path), name)
        refused = refusal_of({**failed[0], "message": message.replace(f"{run.parent}/", "")})
        if refused.code == "source.missing":  # it was there when the request came
            what = f"{message.partition(':')[0]} was removed from the server's disk"
            refused = Refused(410, what, hint="send the request again", code="file.gone")
        refused.data = data
        raise refused
    if is_chat:
        return completion(line, entries[0], created)
    own = [
        {name: output[name] for name in ("seed", "pixel_sha256", "layer") if name in output}
        | {name: entry.get(name, []) for name in ("warnings", "notes")}
        for entry, output in outputs
    ]
    sizes = {f"{output['width']}x{output['height']}" for _, output in outputs}
    suffix = outputs[0][1]["path"].rpartition(".")[2]
    has_layers = any("layer" in output for _, output in outputs)
    return {
        "created": created,
        "data": data,
        "size": sizes.pop() if len(sizes) == 1 else "auto",
        "background": "transparent" if has_layers else "opaque",
        "output_format": "jpeg" if suffix == "jpg" else suffix,
        "usage": _usage(entries, has_images="images" in line),
        "hyimg": own,
    }


def _base64(run: Path, output: Mapping[str, Any]) -> str:
    """Return the picture of an output. Raises Refused if it was removed or changed."""
    try:
        data = bytes_of(run / output["path"], _PICTURE_BYTES)
    except OSError:
        data = b""
    if digest.of_bytes(data) != output["sha256"]:
        what = f"{output['path']} was removed or changed on the server's disk"
        raise Refused(410, what, hint="send the request again", code="output.gone")
    return base64.b64encode(data).decode()


def _usage(entries: Sequence[Mapping[str, Any]], *, has_images: bool) -> dict[str, Any]:
    """Return the tokens read, of prompts and pictures together, and the tokens written."""
    reuse = [entry.get("kv_reuse") or {} for entry in entries]
    read = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("prefill", "shared"))
    wrote = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("decode", "taken"))
    kinds = {"text_tokens": 0 if has_images else read, "image_tokens": read if has_images else 0}
    total = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
    return total | {"input_tokens_details": kinds}


class BatchResults:
    """The results of a batch's requests; result lines and pictures stay on the disk.

    `is_done` maps each ended job to True if it succeeded. It comes from the journal, and a running
    batch keeps it up to date.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = {line["custom_id"]: child_ids(line) for line in _lines_of(folder)}
        self._places = find_last(map(_places_in, RunFolder(folder / RUN).journals()))
        self.is_done = {job: is_done for job, (_, _, is_done) in self._places.items()}

    def counts(self) -> dict[str, int]:
        """Count the requests that have completed and failed; one ends with the last of its jobs."""
        ends = Counter[bool]()
        for jobs in self._jobs.values():
            of_jobs = [self.is_done.get(job) for job in jobs]
            if None not in of_jobs:
                ends[all(of_jobs)] += 1
        return {"total": len(self._jobs), "completed": ends[True], "failed": ends[False]}

    def lines(self, kind: str, record: Mapping[str, Any], status: str) -> Iterator[bytes]:
        """Yield the lines of a file. `record`: the batch's; `status`: how it ended."""
        url = f"{record['base_url']}/batches/{record['id']}"
        created = record.get("in_progress_at") or record["created_at"]
        for line in _lines_of(self._folder):
            jobs = self._jobs[line["custom_id"]]
            ends = [self.is_done.get(job) for job in jobs]
            if all(ends) != (kind == "output"):
                continue
            asked = digest.of_json([record["id"], line["custom_id"]])[:24]
            own = line.get(REQUEST_ID, line["custom_id"])
            answer = {"id": f"batch_req_{asked}", "custom_id": own}
            if None in ends and False not in ends:
                name, message = _NEVER_RAN.get(status, _LOST)
                error = {"code": name, "message": message}
                yield json_line(answer | {"response": None, "error": error})
                continue
            entries = [self._entry(job) for job in jobs if job in self._places]
            try:
                code, body = 200, respond(line, entries, self._folder / RUN, url, created)
            except Refused as refused:
                code, body = refused.status, refused.body()
            response = {"status_code": code, "request_id": f"req_{asked}", "body": body}
            yield json_line(answer | {"response": response, "error": None})

    def _entry(self, job: str) -> dict[str, Any]:
        """Return a job's result line."""
        path, start, _ = self._places[job]
        with opened(path) as file:
            file.seek(start)
            entry: dict[str, Any] = json.loads(file.readline())
            return entry


def _lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a batch's manifest; none if its input was never accepted."""
    if (folder / MANIFEST).is_file():
        with opened(folder / MANIFEST) as file:
            for raw in file:
                if raw.strip():
                    yield json.loads(raw)


def _places_in(journal: Path) -> Iterator[tuple[dict[str, Any], tuple[Path, int, bool]]]:
    """Yield a journal's outcomes, each with its place and whether it succeeded."""
    start = 0
    with opened(journal) as file:
        for raw in file:
            if (entry := entry_of(raw)) is not None:  # otherwise a kill cut it off
                yield entry, (journal, start, entry["status"] == "done")
            start += len(raw)
