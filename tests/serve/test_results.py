"""Large batches: output files that stream, and inputs whose faults are found in time."""

import json
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.serve.intake import write_manifest
from hyimg_cli.serve.results import BatchResults
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import settle
from hyimg_cli.spec import digest

PICTURE = 1_500_000


def folder_of(folder: Path, count: int) -> Path:
    """A batch whose jobs all have one and the same picture."""
    data = os.urandom(PICTURE)
    outputs = folder / "run" / "outputs"
    outputs.mkdir(parents=True)
    (outputs / "a.png").write_bytes(data)
    output = {"path": "outputs/a.png", "sha256": digest.of_bytes(data), "seed": 1}
    output |= {"pixel_sha256": "", "width": 8, "height": 8}
    with (
        open(folder / "manifest.jsonl", "w") as manifest,
        open(folder / "run" / "results.jsonl", "w") as results,
    ):
        for number in range(count):
            entry = {"custom_id": f"job-{number}", "status": "done", "outputs": [output]}
            manifest.write(json.dumps({"custom_id": f"job-{number}", "prompt": "x"}) + "\n")
            results.write(json.dumps(entry | {"error": None, "attempt": 1, "warnings": []}) + "\n")
        results.write('{"custom_id": "cut o')
    return folder


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_an_output_file_streams(tmp_path: Path, count: int) -> None:
    record = {"id": "batch_1", "base_url": "", "created_at": 1}
    results, about = BatchResults(folder_of(tmp_path, count)), (record, "completed")
    nbytes = sum(map(len, results.lines("output", *about)))
    assert nbytes > count * PICTURE * 4 // 3
    tracemalloc.start()
    try:
        assert sum(map(len, results.lines("output", *about))) == nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert not [*results.lines("error", *about)]


@pytest.mark.thorough
def test_the_faults_of_many_lines_are_found_in_time(tmp_path: Path) -> None:
    count, wrong = 50_000, range(17, 50_000, 500)
    folder = tmp_path / "batch"
    folder.mkdir()
    with open(folder / "input.jsonl", "w") as file:
        for number in range(1, count + 1):
            body = {"prompt": f"a cat {number}", "seed": "x" if number in wrong else number}
            line = {"custom_id": f"job-{number}", "method": "POST", "url": "/v1/images/generations"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    uploads = Uploads(tmp_path / "state")
    wire = Wire(frozenset({"tiny-image"}), 3, 100, uploads, settle({}, {}, {}))
    asked = folder, "/v1/images/generations", "ann", wire
    waited, is_over = list[float](), threading.Event()

    def wait() -> None:  # as an event loop does
        while not is_over.is_set():
            began = time.perf_counter()
            time.sleep(0.01)
            waited.append(time.perf_counter() - began)

    other = threading.Thread(target=wait)
    other.start()
    began = time.thread_time()
    try:
        faults: list[Any] = write_manifest(*asked)
    finally:
        is_over.set()
        other.join()
        uploads.close()
    took_s = time.thread_time() - began
    assert [(one["line"], one["param"]) for one in faults] == [(n, "seed") for n in wrong]
    assert took_s < 10
    assert max(waited) < 0.2
