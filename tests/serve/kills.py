"""Kill a server of batches at chosen moments, and count what it lost.

    python tests/serve/kills.py STATE LINES POINT...

Each of four batches has LINES. Each POINT kills one server with SIGKILL at that call of `fsync` or
`replace`, counted from its start. Nothing becomes durable between these calls, so 1, 2, 3, … are
all different moments. A last server finishes the batches. Prints the result as JSON.
"""

import io
import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from fake_service import FakeService, server_of

from hyimg_cli.serve.batches import BatchRequest

OWNER = "ann"
# Batches by how they end; also the idempotency key of each.
KINDS = ("done", "wrong", "cancelled", "late")
WINDOW = {"late": "1s"}


def input_of(kind: str, lines: int) -> bytes:
    bodies: list[dict[str, Any]] = [{"prompt": f"{kind} {n}"} for n in range(lines)]
    bodies[2]["n"] = 2
    bodies[4]["prompt"] = "fail"
    if kind == "wrong":
        bodies[5]["seed"] = "x"
    url = "/v1/images/generations"
    rows = [
        {"custom_id": f"{kind}-{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def serve(folder: Path, lines: int) -> None:
    """Run one server and request every batch, like a client that does not know of the kills."""
    service = FakeService()
    service.pace_s = 0.01
    state = server_of(service, folder)
    state.batches.at_once = 2
    state.batches.start()
    there = {one["filename"]: one["id"] for one in state.uploads.every(OWNER)}
    names = list[str]()
    for kind in KINDS:
        if kind not in there:
            upload = state.uploads.keep(io.BytesIO(input_of(kind, lines)), kind)
            there[kind] = state.uploads.add(OWNER, "batch", upload, None)["id"]
        asked = {"input_file_id": there[kind], "endpoint": "/v1/images/generations"}
        asked["completion_window"] = WINDOW.get(kind, "24h")
        request = BatchRequest(**asked)
        names.append(state.batches.create(OWNER, request, kind, "http://x")["id"])
    cancelled = state.batches.find(names[KINDS.index("cancelled")], OWNER)
    while (shown := cancelled.shown())["status"] in ("validating", "in_progress"):
        if shown["request_counts"]["completed"]:
            state.batches.cancel(cancelled)
        time.sleep(0.002)
    ended = {"completed", "failed", "cancelled", "expired"}
    while {*state.batches.counts()} - ended:
        time.sleep(0.002)
    state.batches.stop()
    state.uploads.close()


def live(folder: Path, lines: int, point: int | None) -> bool:
    """Run a server in its own process and kill it at a point; True if it ended by itself."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), f"the server ended by itself: {status}"
        return status == 0
    calls = count(1)

    def counting(call: Any) -> Any:
        def called(*given: Any) -> Any:
            if next(calls) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given)

        return called

    os.fsync, os.replace = counting(os.fsync), counting(os.replace)
    try:
        serve(folder, lines)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def look(folder: Path) -> dict[str, Any]:
    """Return what the state folder contains, by batch: status, lines, jobs with several lines."""
    state = server_of(FakeService(), folder)
    found = dict[str, Any]()
    for batch in state.batches.every(OWNER):
        shown = batch.shown()
        lines = list[dict[str, Any]]()
        for kind in ("output", "error"):
            if name := shown[f"{kind}_file_id"]:
                record = state.uploads.find(name, OWNER)
                content = b"".join(state.uploads.made(record))
                assert len(content) == record["bytes"], "the size is that of the content"
                lines += map(json.loads, content.splitlines())
        journal = batch.folder / "run" / "results.jsonl"
        rows = journal.read_text().splitlines() if journal.exists() else []
        jobs = [json.loads(row)["custom_id"] for row in rows]
        kind = state.uploads.find(shown["input_file_id"], OWNER)["filename"]
        assert kind not in found, "a batch is there twice"
        found[kind] = {
            "status": shown["status"],
            "counts": shown["request_counts"],
            "lines": sorted(lines, key=lambda one: str(one["custom_id"])),
            "errors": shown["errors"],
            "twice": len(jobs) - len({*jobs}),
            "pictures": sorted(path.name for path in (batch.folder / "run").rglob("*.png")),
            "done": sorted(job for job, row in zip(jobs, rows, strict=True) if '"done"' in row),
        }
    state.uploads.close()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    lines, *points = map(int, sys.argv[2:])
    kills = sum(not live(folder, lines, point) for point in points)
    assert live(folder, lines, None)
    json.dump({"kills": kills, "batches": look(folder)}, sys.stdout)


if __name__ == "__main__":
    main()
