"""A hub on loopback: models' files by its HTTP interface, with its refusals and its faults."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_API = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/(revision|tree)/([^/?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """`models`: folders by id. `gated`, `private`: ids that need the `token`. `revisions`: those
    that exist, with their commits.

    `asked`: method, path, range and authorization of each request. `cuts`: by file name, after how
    many bytes its next answer ends; `wrong`: names whose bytes are not those of their digest.
    """

    address: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    token: str = "hf_a-token-that-nobody-prints"
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    pace_s: float = 0.0

    def fetched(self) -> list[str]:
        """Names of files of which a body was sent, in order."""
        found = (_FILE.fullmatch(path) for method, path, *_ in self.asked if method == "GET")
        return [one[3] for one in found if one]


@contextmanager
def served(**models: Path) -> Iterator[Hub]:
    """Serve models on a free port of loopback; a name's first "_" is the slash of its id."""
    hub = Hub(models={name.replace("_", "/", 1): folder for name, folder in models.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, given = self.hub, self.headers.get("Authorization", "")
        hub.asked.append((self.command, self.path, self.headers.get("Range", ""), given))
        api, file = _API.fullmatch(self.path), _FILE.fullmatch(self.path)
        found = api or file
        if found is None:
            return self._refuse(404, "EntryNotFound")
        model, revision = found[1], (api[3] if api else found[2]) or "main"
        has_token = given == f"Bearer {hub.token}"
        if model not in hub.models or (model in hub.private and not has_token):
            return self._refuse(401, "RepoNotFound")
        commit = hub.revisions.get(revision, revision)
        if commit not in hub.revisions.values():
            return self._refuse(404, "RevisionNotFound")
        if file:
            if model in hub.gated and not has_token:
                return self._refuse(401, "GatedRepo")
            return self._send_file(hub.models[model] / file[3], commit)
        names = sorted(one for one in hub.models[model].rglob("*") if one.is_file())
        root, rows = hub.models[model], list[dict[str, Any]]()
        for one in names:
            row = {"size": one.stat().st_size} | ({"lfs": _lfs(one)} if _is_lfs(one) else {})
            rows.append({"name": str(one.relative_to(root)), "oid": _etag(one), **row})
        if api and api[2] == "tree":
            tree = [{"type": "file", "path": one.pop("name"), **one} for one in rows]
            return self._send(json.dumps(tree).encode())
        files = [{"rfilename": one["name"], "blobId": one["oid"], **one} for one in rows]
        facts = {"id": model, "modelId": model, "sha": commit, "siblings": files, "tags": []}
        facts |= {"gated": "manual" if model in hub.gated else False, "private": False}
        return self._send(json.dumps(facts).encode())

    def _send_file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data, etag = path.read_bytes(), _etag(path)
        if path.name in self.hub.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if _is_lfs(path):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        status, found = 200, _RANGE.fullmatch(self.headers.get("Range", ""))
        if found:
            start = int(found[1])
            stop = min(int(found[2] or len(data)) + bool(found[2]), len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = 206, data[start:stop]
        cut = self.hub.cuts.pop(path.name, None) if self.command == "GET" else None
        return self._send(data, status, headers, cut)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": f"no: {self.path}"})

    def _send(
        self,
        data: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = data if cut is None else data[:cut]
        for at in range(0, len(body), 1 << 16):
            self.wfile.write(body[at : at + (1 << 16)])
            if self.hub.pace_s:
                threading.Event().wait(self.hub.pace_s)
        if cut is not None:
            self.close_connection = True


def _is_lfs(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf", ".bin", ".pth")


def _lfs(path: Path) -> dict[str, Any]:
    return {"oid": _etag(path), "sha256": _etag(path), "size": path.stat().st_size} | {
        "pointerSize": 130
    }


def _etag(path: Path) -> str:
    """The digest that the hub gives: sha256 of large files, git's of others."""
    return _digest_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1000)
def _digest_of(path: Path, _changed: int) -> str:
    data = path.read_bytes()
    if _is_lfs(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
