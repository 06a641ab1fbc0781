"""Batches over HTTP: what is refused, what becomes of each line, and what outlives a server."""

import base64
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService, FakeSession
from PIL import Image

from hyimg_cli.engine.run import run_manifest
from hyimg_cli.errors import MachineError, StorageError
from hyimg_cli.serve import batches
from hyimg_cli.settings.run import OutputConfig, RunConfig

CAT = {"prompt": "a cat", "seed": 7}


def test_a_batch_is_drawn(serve: Any, painter: FakeService) -> None:
    server = serve()
    begun = server.begin(CAT, {"prompt": "fail"}, {"prompt": "a dog"}, metadata={"a": "b"}).json()
    assert begun["status"] == "validating"
    assert begun["expires_at"] == begun["created_at"] + 86_400
    batch = server.wait(begun)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["metadata"] == {"a": "b"}
    assert batch["errors"] is None
    times = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    assert {*painter.scopes} == {(batch["id"], "ann")}
    cat, dog = server.lines(batch["output_file_id"])
    assert (cat["custom_id"], dog["custom_id"]) == ("a", "c")
    assert cat["response"]["status_code"] == 200
    assert cat["error"] is None
    (picture,) = cat["response"]["body"]["data"]
    pixels = Image.open(io.BytesIO(base64.b64decode(picture["b64_json"])))
    assert pixels.getpixel((0, 0)) == (7, 7, 7)
    (lost,) = server.lines(batch["error_file_id"])
    assert lost["custom_id"] == "b"
    assert lost["response"]["body"]["error"]["code"] == "job.fake"
    files = {one["id"]: one for one in server.get("/v1/files?purpose=batch_output")["data"]}
    assert files.keys() == {batch["output_file_id"], batch["error_file_id"]}
    assert server.get(f"/v1/batches/{batch['id']}") == batch


def test_no_file_is_made_of_no_lines(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT).json())
    assert batch["error_file_id"] is None
    assert batch["output_file_id"]


def test_several_pictures_are_one_line(serve: Any) -> None:
    server = serve()
    asked = {"prompt": "a cat", "n": 3, "response_format": "url"}
    batch = server.wait(server.begin(asked, {"prompt": "fail", "n": 2}).json())
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (line,) = server.lines(batch["output_file_id"])
    urls = [one["url"] for one in line["response"]["body"]["data"]]
    assert urls == [f"http://localhost/batches/{batch['id']}/outputs/a-{n}.png" for n in range(3)]
    assert Image.open(io.BytesIO(server.http.get(urls[1]).content)).size == (16, 16)
    assert server.http.get(urls[1], headers={"authorization": "Bearer bob"}).status_code == 404


def test_every_fault_is_told_by_line(serve: Any) -> None:
    server = serve()
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": CAT}
        for _ in range(6)
    ]
    lines[1]["custom_id"] = 7
    lines[2] |= {"custom_id": "c", "body": CAT | {"seed": "x", "temperature": -1, "nonsense": 1}}
    lines[3] |= {"custom_id": "d", "url": "/v1/videos"}
    lines[4] |= {"custom_id": "e", "body": [], "more": 1}
    lines[5] |= {"custom_id": "f", "body": {"prompt": "x", "images": [{"file_id": "file-no"}]}}
    rows = [*map(json.dumps, lines), "{", "", json.dumps(lines[0])]
    name = server.upload("\n".join(rows).encode()).json()["id"]
    asked = {"input_file_id": name, "endpoint": "/v1/images/generations"}
    batch = server.http.post("/v1/batches", json=asked | {"completion_window": "24h"}).json()
    batch = server.wait(batch)
    assert batch["status"] == "failed"
    assert batch["failed_at"]
    assert batch["in_progress_at"] is None
    found = [(one["line"], one["param"], one["code"]) for one in batch["errors"]["data"]]
    assert found == [
        (2, "custom_id", "batch.bad-line"),
        (3, "seed", "manifest.wrong-type"),
        (3, "temperature", "manifest.out-of-range"),
        (3, "nonsense", "manifest.unknown-field"),
        (4, "url", "batch.bad-line"),
        (5, "more", "batch.bad-line"),
        (6, "images", "file.not-found"),
        (7, None, "batch.bad-json"),
        (9, "custom_id", "manifest.duplicate-id"),
    ]
    assert all(one["message"] for one in batch["errors"]["data"])
    assert batch["errors"]["data"][0]["message"] == "custom_id is 7, expected text"


def test_a_request_may_have_any_text_as_its_id(serve: Any) -> None:
    server = serve()
    names = ["Order 12: cat.jpg", "req:1", "a|b", "тест", "../x", "x" * 129, "a", "A", "cat-0",
             "cat", "line\nbreak", "😀", " ", "CON", "a/b.c/d"]  # fmt: skip
    lines = [
        {
            "custom_id": name,
            "url": "/v1/images/generations",
            "body": CAT | {"n": 1 + (name == "cat")},
        }
        for name in names
    ]
    lines[3]["method"] = "post"
    lines[0]["body"]["x_custom_id"] = "theirs"
    file = server.upload("\n".join(map(json.dumps, lines)).encode()).json()["id"]
    batch = server.wait(server.begin(CAT, input_file_id=file).json())
    assert batch["request_counts"]["completed"] == len(names), batch["errors"]
    found = server.lines(batch["output_file_id"])
    assert [one["custom_id"] for one in found] == names
    assert len({one["id"] for one in found}) == len(names)


def test_an_empty_file_and_too_many_lines_are_faults(serve: Any, monkeypatch: Any) -> None:
    server = serve()
    (fault,) = server.wait(server.begin().json())["errors"]["data"]
    assert fault["code"] == "manifest.empty"
    monkeypatch.setattr("hyimg_cli.serve.intake.MOST_LINES", 2)
    (fault,) = server.wait(server.begin(CAT, CAT, CAT, CAT).json())["errors"]["data"]
    assert (fault["line"], fault["code"]) == (3, "batch.too-many-lines")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": 1}, "endpoint"),
        ({"endpoint": "/v1/videos"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
        ({"priority": 1}, "priority"),
    ],
)
def test_a_wrong_batch_is_refused(serve: Any, asked: Any, param: str) -> None:
    server = serve()
    found = server.begin(CAT, **asked)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    assert server.get("/v1/batches")["data"] == []


def test_files_of_others_and_of_other_purposes_make_no_batch(serve: Any) -> None:
    server = serve()
    for name, status in (
        (server.upload(b"x", headers={"authorization": "Bearer bob"}).json()["id"], 404),
        (server.upload(b"x", "vision").json()["id"], 400),
        ("../../x", 404),
    ):
        found = server.begin(CAT, input_file_id=name)
        assert found.status_code == status
        assert found.json()["error"]["param"] == "input_file_id"


def test_another_callers_batches_are_not_there(serve: Any) -> None:
    server, bob = serve(), {"authorization": "Bearer bob"}
    batch = server.wait(server.begin(CAT).json())
    assert server.get("/v1/batches", headers=bob)["data"] == []
    for method, path in (
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/batches/{batch['id']}/outputs/a.png"),
        ("GET", f"/v1/files/{batch['output_file_id']}/content"),
    ):
        assert server.http.request(method, path, headers=bob).status_code == 404
    assert server.http.get(f"/batches/{batch['id']}/outputs/a.png").status_code == 200


def test_the_same_key_is_the_same_batch(serve: Any, painter: FakeService) -> None:
    server, key = serve(), {"idempotency-key": "night 1"}
    first = server.begin(CAT, headers=key).json()
    asked = {name: first[name] for name in ("input_file_id", "endpoint", "completion_window")}
    assert server.http.post("/v1/batches", json=asked, headers=key).json()["id"] == first["id"]
    server.wait(first)
    again = serve()
    assert again.http.post("/v1/batches", json=asked, headers=key).json()["id"] == first["id"]
    other = again.http.post("/v1/batches", json=asked | {"metadata": {}}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "batch.other-body")
    bob = again.begin(CAT, headers=key | {"authorization": "Bearer bob"})
    assert bob.status_code == 404  # his key is his own, and the file is ann's
    assert painter.painted == ["a"]
    assert len(again.get("/v1/batches")["data"]) == 1


def test_a_cancelled_batch_keeps_what_is_done(serve: Any, painter: FakeService) -> None:
    painter.pace_s = 0.1
    server = serve()
    begun = server.begin(*[{"prompt": f"cat {n}"} for n in range(20)]).json()
    while not server.get(f"/v1/batches/{begun['id']}")["request_counts"]["completed"]:
        time.sleep(0.01)
    asked = server.http.post(f"/v1/batches/{begun['id']}/cancel").json()
    assert asked["status"] in ("cancelling", "cancelled")
    batch = server.wait(begun)
    assert batch["status"] == "cancelled"
    counts = batch["request_counts"]
    assert 0 < counts["completed"] < 20
    assert len(server.lines(batch["output_file_id"])) == counts["completed"]
    never = server.lines(batch["error_file_id"])
    assert len(never) == 20 - counts["completed"]
    assert {one["error"]["code"] for one in never} == {"batch_cancelled"}
    assert {one["response"] for one in never} == {None}
    assert server.http.post(f"/v1/batches/{begun['id']}/cancel").json() == batch


def test_a_batch_that_waits_is_cancelled_at_once(serve: Any, painter: FakeService) -> None:
    painter.pace_s = 30.0
    server = serve(batches_at_once=1)
    first = server.wait(server.begin(CAT).json(), "in_progress")
    second = server.begin(CAT).json()
    while not server.get(f"/v1/batches/{second['id']}")["request_counts"]["total"]:
        time.sleep(0.01)
    server.http.post(f"/v1/batches/{second['id']}/cancel")
    assert server.wait(second)["status"] == "cancelled"
    assert server.wait(first, "in_progress")
    over = server.http.post(f"/v1/batches/{first['id']}/cancel")
    assert over.status_code == 200
    assert server.wait(first)["status"] == "cancelled"
    assert painter.painted == []


def test_a_batch_that_is_over_cannot_be_cancelled(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT).json())
    found = server.http.post(f"/v1/batches/{batch['id']}/cancel")
    assert (found.status_code, found.json()["error"]["code"]) == (400, "batch.is-over")


def test_a_batch_expires(serve: Any, painter: FakeService) -> None:
    painter.pace_s = 0.2
    server = serve(batches_at_once=1)
    running = server.begin(*[{"prompt": f"cat {n}"} for n in range(20)], completion_window="1s")
    waiting = server.begin(*[CAT] * 20, completion_window="1s")
    for batch in map(server.wait, (running.json(), waiting.json())):
        assert batch["status"] == "expired"
        assert batch["expired_at"] >= batch["expires_at"]
        never = server.lines(batch["error_file_id"])
        assert {one["error"]["code"] for one in never} == {"batch_expired"}
        counts = batch["request_counts"]
        assert counts["total"] == counts["completed"] + len(never)


def test_batches_run_in_the_order_they_came(
    serve: Any, painter: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter.gate.clear()
    server = serve(batches_at_once=1)
    # Ids in the opposite order, which a listing of the folder may have.
    ids = (f"{n:024x}" for n in range(900, 0, -1))
    monkeypatch.setattr("hyimg_cli.serve.batches.secrets.token_hex", lambda _: next(ids))
    begun = [server.begin(CAT, metadata={"n": str(n)}).json() for n in range(4)]
    serve(batches_at_once=1)  # and so at the next start
    painter.scopes.clear()
    again = serve(batches_at_once=1)
    painter.gate.set()
    for one in begun:
        assert again.wait(one)["status"] == "completed"
    order = dict.fromkeys(scope for scope, _ in painter.scopes)
    assert [*order] == [one["id"] for one in begun]
    page = again.get("/v1/batches?limit=3")
    assert [one["id"] for one in page["data"]] == [one["id"] for one in begun[:0:-1]]
    assert page["has_more"]


def test_the_folder_is_an_ordinary_run(serve: Any, painter: FakeService, monkeypatch: Any) -> None:
    server = serve()
    photo = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(photo, "PNG")
    source = server.upload(photo.getvalue(), "vision").json()["id"]
    edit = {"prompt": "blue", "images": [{"file_id": source}]}
    batch = server.wait(server.begin(edit, edit | {"n": 2}).json())
    folder = server.folder / "batches" / batch["id"]
    monkeypatch.setattr(
        "hyimg_cli.engine.run.session_for", lambda config: pytest.fail("all of it is done")
    )
    config = RunConfig(OutputConfig(folder / "run", report=False))
    summary = run_manifest(folder / "manifest.jsonl", config)
    assert (summary.skipped, summary.left) == (3, 0)
    assert json.loads((folder / "manifest.jsonl").read_text().splitlines()[0])["images"] == [
        f"sources/{os.listdir(folder / 'sources')[0]}"
    ]


def test_a_deleted_upload_stays_in_its_batch(serve: Any, painter: FakeService) -> None:
    server = serve(batches_at_once=1)
    painter.pace_s = 0.3
    first = server.begin(CAT).json()
    photo = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(photo, "PNG")
    source = server.upload(photo.getvalue(), "vision").json()["id"]
    second = server.begin({"prompt": "x", "images": [{"file_id": source}]}).json()
    while not server.get(f"/v1/batches/{second['id']}")["request_counts"]["total"]:
        time.sleep(0.01)
    server.http.delete(f"/v1/files/{source}")
    server.http.delete(f"/v1/files/{second['input_file_id']}")
    for path in (server.folder / "uploads").iterdir():
        path.unlink()
    assert server.wait(second)["request_counts"]["completed"] == 1
    server.wait(first)


def test_a_picture_that_is_gone_is_told(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT, CAT | {"seed": 8}, CAT | {"seed": 9}).json())
    outputs = server.folder / "batches" / batch["id"] / "run" / "outputs"
    (outputs / "a.png").unlink()
    (outputs / "b.png").write_bytes(b"another")
    content = server.http.get(f"/v1/files/{batch['output_file_id']}/content").text
    gone, changed, whole = map(json.loads, content.splitlines())
    for line in (gone, changed):
        assert line["response"]["status_code"] == 410
        assert line["response"]["body"]["error"]["code"] == "output.gone"
    assert whole["response"]["status_code"] == 200
    server.http.delete(f"/v1/files/{batch['output_file_id']}")
    assert not outputs.exists()


@pytest.mark.parametrize(
    "error",
    [StorageError("the disk is full", code="storage.full"), MachineError("the GPU failed")],
)
def test_what_ends_a_run_is_told_and_it_goes_on(
    serve: Any, painter: FakeService, monkeypatch: Any, error: Exception
) -> None:
    monkeypatch.setattr(batches, "_AGAIN_S", 0.6)
    painter.error = error
    server = serve()
    begun = server.begin(*[{"prompt": f"cat {n}"} for n in range(4)]).json()
    while not (found := server.get(f"/v1/batches/{begun['id']}"))["errors"]:
        time.sleep(0.01)
    assert found["status"] == "in_progress"
    assert error.args[0] in found["errors"]["data"][0]["message"]
    batch = server.wait(begun)
    assert batch["status"] == "completed"
    assert batch["errors"] is None
    assert sorted(painter.painted) == ["a", "b", "c", "d"]


def test_a_full_disk_refuses_a_batch_and_keeps_nothing(serve: Any, monkeypatch: Any) -> None:
    server = serve()
    name = server.upload(b"{}").json()["id"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hyimg_cli.serve.batches.link", full)
    found = server.begin(CAT, input_file_id=name)
    assert (found.status_code, found.json()["error"]["code"]) == (507, "storage.full")
    assert os.listdir(server.folder / "batches") == []
    assert server.get("/v1/batches")["data"] == []


def test_the_page_of_a_run_is_served_and_nothing_else(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT).json())
    run = server.folder / "batches" / batch["id"] / "run"
    record = json.loads((run / "run.json").read_text())
    assert record["manifest"]["name"] == batch["id"], "the title of its page"
    (run / "report.html").write_text("<p>the run")
    (run / "outputs" / "link.png").symlink_to(run.parent / "batch.json")
    assert server.http.get(f"/batches/{batch['id']}/").text == "<p>the run"
    assert server.http.get(f"/batches/{batch['id']}/outputs/a.png").status_code == 200
    for path in ("results.jsonl", "outputs/..%2fresults.jsonl", "%2fetc%2fhostname", "..",
                 "outputs", "outputs/link.png", "outputs/%00", "../batch.json",
                 "%2e", "%2f", "outputs/%2e%2e/results.jsonl"):  # fmt: skip
        assert server.http.get(f"/batches/{batch['id']}/{path}").status_code == 404, path


def test_output_files_expire(serve: Any, monkeypatch: Any) -> None:
    server = serve()
    policy = {"anchor": "created_at", "seconds": 3600}
    batch = server.wait(server.begin(CAT, output_expires_after=policy).json())
    file = server.get(f"/v1/files/{batch['output_file_id']}")
    assert file["expires_at"] == file["created_at"] + 3600
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    assert server.http.get(f"/v1/files/{file['id']}/content").status_code == 200, "clock set"
    monkeypatch.setattr(time, "time", lambda: now() + 3500)
    assert serve().http.get(f"/v1/files/{file['id']}/content").status_code == 200
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    assert serve().http.get(f"/v1/files/{file['id']}/content").status_code == 404


def test_what_a_kill_left_of_a_batch_that_was_never_told_goes(serve: Any, tmp_path: Path) -> None:
    left = tmp_path / "state" / "batches" / ".batch_1.17.tmp"
    left.mkdir(parents=True)
    assert serve().get("/v1/batches")["data"] == []
    assert not left.exists()


def test_a_run_by_hand_finishes_a_batch_and_the_server_one_that_was_begun_so(
    serve: Any, painter: FakeService, monkeypatch: Any
) -> None:
    painter.pace_s = 0.1
    server = serve()
    lines = [{"prompt": f"cat {n}"} for n in range(12)]
    begun = server.begin(*lines).json()
    while len(painter.painted) < 3:
        time.sleep(0.01)
    server.state.batches.stop()
    server.state.uploads.close()
    painter.pace_s = 0.0
    folder = server.folder / "batches" / begun["id"]
    monkeypatch.setattr(
        "hyimg_cli.engine.run.session_for",
        lambda config: FakeSession(painter, "x", is_online=False),
    )
    config = RunConfig(OutputConfig(folder / "run", report=False))
    half = run_manifest(folder / "manifest.jsonl", config, limit=6)
    assert half.skipped
    assert half.skipped + half.done == 6
    batch = serve().wait(begun)
    assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert sorted(painter.painted) == [chr(97 + n) for n in range(12)]


def test_a_source_that_is_gone_is_its_lines_error_without_a_place(
    serve: Any, painter: FakeService
) -> None:
    painter.pace_s = 0.3
    server = serve(batches_at_once=1)
    server.begin(CAT)
    photo = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(photo, "PNG")
    source = server.upload(photo.getvalue(), "vision").json()["id"]
    begun = server.begin({"prompt": "x", "images": [{"file_id": source}]}).json()
    while not server.get(f"/v1/batches/{begun['id']}")["request_counts"]["total"]:
        time.sleep(0.01)
    for path in (server.folder / "batches" / begun["id"] / "sources").iterdir():
        path.unlink()
    (line,) = server.lines(server.wait(begun)["error_file_id"])
    error = line["response"]["body"]["error"]
    assert (line["response"]["status_code"], error["code"]) == (410, "file.gone")
    assert error["message"].startswith("image 1 was removed from the server's disk")
