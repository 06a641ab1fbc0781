"""A damaged or foreign file in the state folder is named and skipped; the server starts."""

import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService

CAT = {"prompt": "a cat", "seed": 7}
Damage = Callable[[Path], object]


def changed(**fields: Any) -> Damage:
    """Changes fields of a JSON file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


DAMAGES: dict[str, Damage] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[]"),
    "an object": lambda path: path.write_text("{}"),
    "deep": lambda path: path.write_text("[" * 5000 + "]" * 5000),
    "NaN": changed(came=float("nan")),
    "other type": changed(created_at="1"),
    "other id": changed(id="batch_" + "0" * 24),
    "removed": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


def test_damaged_records_are_skipped_by_name(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    *lost, whole = [server.begin(CAT).json() for _ in range(len(DAMAGES) + 1)]
    *lost, whole = map(server.wait, (*lost, whole))
    uploads = [server.upload(kind.encode()).json()["id"] for kind in DAMAGES]
    skipped = []
    for kind, batch, upload in zip(DAMAGES, lost, uploads, strict=True):
        for place in (f"batches/{batch['id']}/batch.json", f"files/{upload}"):
            DAMAGES[kind](server.folder / place)
            if (kind, place) != ("removed", f"files/{upload}"):
                skipped.append(server.folder / place)
    again = serve()
    assert [one for one in skipped if f"skipped {one}: " not in caplog.text] == []
    assert [one["id"] for one in again.get("/v1/batches")["data"]] == [whole["id"]]
    for kind, batch, upload in zip(DAMAGES, lost, uploads, strict=True):
        assert again.http.get(f"/v1/files/{upload}").status_code == 404, kind
        # Its batch may be repaired.
        gone = again.http.get(f"/v1/files/{batch['output_file_id']}/content")
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "file.gone"), kind
    assert len(again.lines(whole["output_file_id"])) == 1
    assert again.wait(again.begin(CAT).json())["status"] == "completed"


def test_foreign_files_are_left_alone(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT).json())
    foreign = []
    for folder in ("files", "batches", "uploads", "online"):
        for name in (".DS_Store", "notes.txt", "lost+found/x", "batch_1/a", ".snapshot/a"):
            path = server.folder / folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
            os.utime(path.parent, (0, 0))
            os.utime(path, (0, 0))
            if folder != "online":  # of nobody after a restart
                foreign.append(path)
    again = serve()
    assert again.get("/v1/batches")["data"] == [batch]
    assert len(again.lines(batch["output_file_id"])) == 1
    assert all(path.read_text() == "mine" for path in foreign)
    shutil.rmtree(server.folder / "online")
    (server.folder / "online").write_text("a file")
    assert serve().wait(batch)["status"] == "completed"


def test_the_files_of_a_batch_that_was_deleted_are_forgotten(serve: Any) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT, {"prompt": "fail"}).json())
    names = [batch["output_file_id"], batch["error_file_id"]]
    shutil.rmtree(server.folder / "batches" / batch["id"])
    for name in names:  # while the server runs
        gone = server.http.get(f"/v1/files/{name}/content")
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "file.gone")
    again = serve()
    assert [one["id"] for one in again.get("/v1/files")["data"]] == [batch["input_file_id"]]
    assert again.http.get(f"/v1/files/{names[0]}/content").status_code == 404


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        ("manifest.jsonl", Path.unlink),
        ("manifest.jsonl", cut),
        ("run/results.jsonl", Path.unlink),
        ("run", shutil.rmtree),
    ],
)
def test_a_part_of_a_batch_that_is_gone(serve: Any, place: str, damage: Damage) -> None:
    server = serve()
    batch = server.wait(server.begin(CAT).json())
    damage(server.folder / "batches" / batch["id"] / place)
    again = serve()
    gone = again.http.get(f"/v1/files/{batch['output_file_id']}/content")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "file.gone")
    assert again.wait(again.begin(CAT).json())["status"] == "completed"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_batch_without_its_input_fails(serve: Any, painter: FakeService, is_read: bool) -> None:
    painter.gate.clear()
    server = serve()
    begun = server.begin(CAT).json()
    folder = server.folder / "batches" / begun["id"]
    server.wait(begun, "in_progress")
    server.close()
    (folder / "input.jsonl").unlink()
    if is_read:
        cut(folder / "manifest.jsonl")
    else:
        (folder / "manifest.jsonl").unlink()
    painter.gate.set()
    found = serve().wait(begun)
    assert found["status"] == "failed"
    assert found["errors"]["data"][0]["code"] == "file.gone"


def test_content_that_was_cut_is_gone_until_it_is_sent_again(serve: Any) -> None:
    server, data = serve(), b"0123456789"
    name = server.upload(data).json()["id"]
    (content,) = (server.folder / "uploads").iterdir()
    content.write_bytes(data[:5])
    gone = server.http.get(f"/v1/files/{name}/content")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "file.gone")
    server.upload(data)
    assert server.http.get(f"/v1/files/{name}/content").content == data


def test_a_clock_that_is_set_forward_ends_nothing(
    serve: Any, painter: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter.gate.clear()
    server = serve()
    begun = server.begin(CAT).json()
    file = server.upload(
        b"x", fields={"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    ).json()
    unnamed = server.state.uploads.keep(io.BytesIO(b"of a request")).path
    server.wait(begun, "in_progress")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)
    server.state.uploads.sweep()
    assert not server.state.batches.find(begun["id"], "ann").is_late
    assert server.http.get(f"/v1/files/{file['id']}").status_code == 200
    assert unnamed.exists()
    monkeypatch.setattr(time, "time", now)
    painter.gate.set()
    assert server.wait(begun)["status"] == "completed"


def test_a_window_that_ends_while_the_server_is_down(
    serve: Any, painter: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter.gate.clear()
    server = serve()
    begun = server.begin(CAT).json()
    server.wait(begun, "in_progress")
    server.close()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)
    assert serve().wait(begun)["status"] == "expired"
