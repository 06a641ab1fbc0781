"""Opens the pages of batches in a browser of somebody who has an API key.

A browser sends no `Authorization` header. So the page asks for the key once, in a form, and gets a
cookie for it, which only reads pages. The cookie contains no key: it is signed with a secret of the
state folder and with the key's digest, so it ends with its time, or with the key.
"""

import hashlib
import hmac
import os
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from hyimg_cli.files import bytes_of, replacing
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.serve.errors import Refused
from hyimg_cli.serve.keys import Keys

PAGES = "/batches/"
_SECRET, _COOKIE = "login-secret", "hyimg_pages"
_SECRET_BYTES, _FORM_BYTES = 32, 4_000
_LASTS_S = 7 * 86_400
_HEAD = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hyimg: log in</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body{{font:1rem system-ui;max-width:24rem;margin:4rem auto;padding:0 1rem}}
input,button{{font:inherit;padding:.5rem;margin:.5rem 0;width:100%;box-sizing:border-box}}</style>
<main><h1>Batch page</h1><form method="post"><label for="key">{ask}</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open</button></form></main></html>
"""


class Login:
    """Cookies for the pages of batches."""

    def __init__(self, state: Path, keys: Keys) -> None:
        """Read the secret of the state folder, or make one. Raises StorageError."""
        self._keys, path = keys, state / _SECRET
        with disk_errors(state):
            data = bytes_of(path, 1_000) if path.is_file() else b""
            if len(data) != _SECRET_BYTES:
                data = secrets.token_bytes(_SECRET_BYTES)
                with replacing(path) as temporary:
                    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(data)
        self._secret = data

    def caller_of(self, request: Request) -> str | None:
        """Return the name of the key that a request's cookie is for; None without a valid one."""
        if request.method not in ("GET", "HEAD") or not request.url.path.startswith(PAGES):
            return None
        try:
            written = SimpleCookie(request.headers.get("cookie", "")).get(_COOKIE)
        except CookieError:
            return None
        name, _, rest = (written.value if written else "").partition(":")
        until, _, signature = rest.partition(":")
        if not (until.isascii() and until.isdecimal() and len(until) < 12):
            return None
        known = self._signature(name, until)
        is_ours = known is not None and hmac.compare_digest(known.encode(), signature.encode())
        return name if is_ours and time.time() < int(until) else None

    def asks(self, request: Request) -> bool:
        """Return True if a request without a key is answered with the form, or is the form."""
        is_page = request.url.path.startswith(PAGES) and len(self._keys) > 0
        is_form = request.headers.get("content-type", "").startswith(
            "application/x-www-form-urlencoded"
        )
        wants_page = "text/html" in request.headers.get("accept", "")
        return is_page and (
            (request.method == "GET" and wants_page) or (request.method == "POST" and is_form)
        )

    async def answer(self, request: Request) -> Response:
        """Return the form, or the cookie for the key in it. Raises Refused."""
        if request.method == "GET":
            return HTMLResponse(_FORM.format(ask="API key"), 401, _HEAD)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "the form is of another site", code="request.host")
        data = b""
        async for piece in request.stream():
            data += piece
            if len(data) > _FORM_BYTES:
                break
        try:
            key = parse_qs(data.decode(), max_num_fields=4).get("key", [""])[0]
        except ValueError:
            key = ""
        name = self._keys.caller_of(f"Bearer {key}")
        if name is None or len(data) > _FORM_BYTES:
            return HTMLResponse(_FORM.format(ask="This key is not known. API key"), 401, _HEAD)
        until = str(int(time.time()) + _LASTS_S)
        answer = Response(status_code=303, headers=_HEAD | {"location": request.url.path})
        answer.set_cookie(
            *(_COOKIE, f"{name}:{until}:{self._signature(name, until)}"),
            max_age=_LASTS_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _signature(self, name: str, until: str) -> str | None:
        digest = self._keys.digest_of(name)
        if digest is None:
            return None
        return hmac.new(
            self._secret + digest, f"{name}:{until}".encode(), hashlib.sha256
        ).hexdigest()
