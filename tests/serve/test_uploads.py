"""Files of callers: whole, bounded, each caller's own."""

import hashlib
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.serve.errors import Refused
from hyimg_cli.serve.uploads import Uploads


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def named(caller: str) -> dict[str, str]:
    return {"authorization": f"Bearer {caller}"}


def error_of(response: Any) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@pytest.fixture
def uploads(tmp_path: Path) -> Any:
    found = Uploads(tmp_path / "state")
    found.most_bytes, found.total_bytes = 100_000, 150_000
    yield found
    found.close()


def test_a_file_comes_back_as_it_was_sent(serve: Any) -> None:
    server, data = serve(), os.urandom(200_000)
    file = server.upload(data, "vision").json()
    assert file["bytes"] == len(data)
    assert file["status"] == "processed"
    assert file["object"] == "file"
    assert file["filename"] == "a.jsonl"
    assert server.get(f"/v1/files/{file['id']}") == file
    content = server.http.get(f"/v1/files/{file['id']}/content")
    assert content.content == data
    assert content.headers["x-content-type-options"] == "nosniff"
    again = serve()  # the next server has it too
    assert again.get(f"/v1/files/{file['id']}") == file
    assert again.http.delete(f"/v1/files/{file['id']}").json() == {
        "id": file["id"], "object": "file", "deleted": True,
    }  # fmt: skip
    assert again.http.get(f"/v1/files/{file['id']}").status_code == 404


def test_content_is_stored_once(serve: Any) -> None:
    server = serve()
    names = {server.upload(b"the same", headers=named(who)).json()["id"] for who in ("ann", "bob")}
    assert len(names) == 2
    sha256 = hashlib.sha256(b"the same").hexdigest()
    assert os.listdir(server.folder / "uploads") == [sha256]


def test_another_callers_files_are_not_there(serve: Any) -> None:
    server = serve()
    name = server.upload(b"x").json()["id"]
    bob = {"authorization": "Bearer bob"}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        found = server.http.request(method, f"/v1/files/{name}{path}", headers=bob)
        assert error_of(found) == (404, "file.not-found", "file_id")
    assert server.get("/v1/files", headers=bob)["data"] == []
    assert server.get(f"/v1/files/{name}")["id"] == name


def test_a_list_is_read_in_pages(serve: Any) -> None:
    server = serve()
    names = [server.upload(b"x").json()["id"] for _ in range(5)]
    server.upload(b"y", "vision")
    first = server.get("/v1/files?purpose=batch&limit=2&order=asc")
    assert [one["id"] for one in first["data"]] == names[:2]
    assert first["has_more"]
    rest = server.get(f"/v1/files?purpose=batch&order=asc&after={first['last_id']}")
    assert [one["id"] for one in rest["data"]] == names[2:]
    assert not rest["has_more"]
    latest = server.get("/v1/files")["data"]
    assert latest[0]["purpose"] == "vision"
    assert len(latest) == 6
    for query in ("limit=0", "limit=x", "order=up", "after=file-none"):
        found = server.http.get(f"/v1/files?{query}")
        assert error_of(found) == (400, "request.bad-value", query.partition("=")[0])


@pytest.mark.parametrize(
    ("form", "files", "status", "code"),
    [
        ({"purpose": "fine-tune"}, {"file": ("a", b"x")}, 400, "request.bad-value"),
        ({"purpose": "batch"}, {"other": ("a", b"x")}, 400, "request.missing-field"),
        ({"purpose": "batch"}, {"file": ("a", b"x"), "b": ("b", b"y")}, 413,
         "request.too-many-parts"),
        ({f"field{n}": "x" for n in range(70)}, {"file": ("a", b"x")}, 413,
         "request.too-many-parts"),
        ({"purpose": "b" * 1_100_000}, {"file": ("a", b"x")}, 413, "request.too-large"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at",
          "expires_after[seconds]": "1"}, {"file": ("a", b"x")}, 400, "request.bad-value"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused(serve: Any, form: Any, files: Any, status: int, code: str) -> None:
    server = serve()
    found = server.http.post("/v1/files", data=form, files=files)
    assert error_of(found)[:2] == (status, code)
    assert server.get("/v1/files")["data"] == []


def test_a_text_in_place_of_the_file_is_named(serve: Any) -> None:
    found = serve().http.post("/v1/files", data={"purpose": "batch"}, files={"file": (None, "x")})
    assert error_of(found) == (400, "request.bad-value", "file")
    assert found.json()["error"]["message"] == 'file is "x" (send it as a file of a form)'


@pytest.mark.parametrize("body", [b"", b"--x\r\nnot a header", b"--x\r\n\r\n", b"no boundary"])
def test_a_damaged_form_is_refused(serve: Any, body: bytes) -> None:
    server, head = serve(), {"content-type": "multipart/form-data; boundary=x"}
    found = server.http.post("/v1/files", content=body, headers=head)
    assert error_of(found)[:2] == (400, "request.bad-form")
    found = server.http.post("/v1/files", content=body, headers={"content-type": "text/plain"})
    assert error_of(found)[:2] == (400, "request.not-a-form")


def test_a_file_too_large_leaves_nothing(serve: Any) -> None:
    server = serve()
    server.state.uploads.most_bytes = 1000
    assert error_of(server.upload(b"x" * 1001))[:2] == (413, "request.too-large")
    # The form is counted too, whatever its parts are.
    assert error_of(server.upload(b"x" * 2_000_000))[:2] == (413, "request.too-large")
    form = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'
    head = {"content-type": "multipart/form-data; boundary=x"}
    found = server.http.post("/v1/files", content=form + b" " * 2_000_000, headers=head)
    assert error_of(found)[:2] == (413, "request.too-large")
    assert os.listdir(server.folder / "uploads") == []
    assert server.upload(b"x" * 1000).status_code == 200


def test_the_disk_is_bounded(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"a" * 70_000, b"a" * 70_000, b"b" * 80_000):  # twice the same counts once
        uploads.keep(io.BytesIO(data))
    with pytest.raises(Refused) as refused:
        uploads.keep(io.BytesIO(b"c"))
    assert refused.value.code == "uploads.full"
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3601)
    uploads.sweep()
    assert uploads.keep(io.BytesIO(png(8, 8))).path.is_file()


def test_a_file_lasts_as_long_as_was_asked_for(serve: Any, monkeypatch: Any) -> None:
    server = serve()
    policy = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = server.upload(b"x", fields=policy).json()
    assert file["expires_at"] == file["created_at"] + 3600
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert server.http.get(f"/v1/files/{file['id']}").status_code == 200, "the clock was set"
    again = serve()
    assert again.http.get(f"/v1/files/{file['id']}").status_code == 404
    assert os.listdir(server.folder / "files") == []


def test_content_stays_while_it_is_named(uploads: Uploads, tmp_path: Path) -> None:
    upload = uploads.keep(io.BytesIO(png(8, 8)))
    record = uploads.add("ann", "vision", upload, None)
    os.utime(upload.path, (0, 0))
    uploads.sweep()
    assert uploads.path_of(uploads.find(record["id"], "ann")) == upload.path
    uploads.close()
    uploads = Uploads(tmp_path / "state")  # it was not used since
    uploads.sweep()
    assert upload.path.is_file()
    uploads.delete(record)
    uploads.sweep()  # a request may have it yet
    assert upload.path.is_file()
    os.utime(upload.path, (0, 0))
    uploads.sweep()
    assert upload.path.is_file(), "the clock was set"
    uploads.close()
    again = Uploads(tmp_path / "state")
    again.sweep()
    again.close()
    assert not upload.path.exists()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "source.empty"),
        (b"no picture", "source.not-an-image"),
        (png(5001, 5000), "source.too-large"),
        (png(400, 400)[:-40], "source.truncated"),
    ],
)
def test_what_is_no_picture_is_refused(uploads: Uploads, data: bytes, code: str) -> None:
    kept = uploads.keep(io.BytesIO(data))
    with pytest.raises(Refused) as refused:
        uploads.checked(kept.path)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert str(uploads.folder) not in str(refused.value)


def test_a_second_server_is_refused(uploads: Uploads, tmp_path: Path) -> None:
    with pytest.raises(OutputFolderError, match=f"process {os.getpid()}"):
        Uploads(tmp_path / "state")


def test_what_a_kill_left_goes(uploads: Uploads, tmp_path: Path) -> None:
    (uploads.folder / ".half.1.tmp").write_bytes(b"x")
    uploads.close()
    assert len(os.listdir(uploads.folder)) == 1
    Uploads(tmp_path / "state").close()
    assert os.listdir(uploads.folder) == []


def test_a_content_that_somebody_removed_is_told(serve: Any) -> None:
    server = serve()
    name = server.upload(b"x").json()["id"]
    for path in (server.folder / "uploads").iterdir():
        path.unlink()
    assert error_of(server.http.get(f"/v1/files/{name}/content"))[:2] == (410, "file.gone")
