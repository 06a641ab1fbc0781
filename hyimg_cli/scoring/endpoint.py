"""Ask a model behind an OpenAI-compatible chat endpoint about pictures; the standard library alone.

Runs in a scorer's process, also for scorers of the user's own. The endpoint's key is in the
variable HYIMG_JUDGE_KEY; it goes to the address that was given, and follows no redirection.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_RETRIES = 4
# Seconds of a batch's limit that are left for everything but waiting.
_RESERVE_S = 20.0
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_MOST_REPLY, _MOST_SHOWN = 1_000_000, 300
# What providers call a reply that their filter held back.
_FILTERED = ("content_filter", "content_policy", "ResponsibleAIPolicyViolation", "jailbreak")


class CannotJudge(Exception):
    """The endpoint will answer no case: the address, the key or the model's name is wrong."""

    stops_scoring = True


@dataclass(frozen=True)
class Reply:
    """A model's reply: its text, or the fault that explains why there is none.

    `facts`: the model as the endpoint names it, its fingerprint and the endpoint's host.
    """

    text: str = ""
    fault: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_asked: Any) -> None:
        return None


def picture_part(data: bytes, name: str = "") -> dict[str, Any]:
    """Return the part of a message that holds a picture's file.

    Raises ValueError for a file that is not a picture: nothing else leaves the machine.
    """
    kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        raise ValueError("not a PNG, JPEG or WebP: " + name)
    url = "data:image/" + kind + ";base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(url: str, request: dict[str, Any], limit_s: float) -> Reply:
    """Return the reply to a chat request, by `url`, an endpoint's address that ends in /v1.

    A request that was refused for now (429, 5xx, a broken connection) is sent again up to four
    times; one that is not answered in time is not, because an endpoint may charge for both.
    `limit_s`: the seconds that a batch may take. Raises CannotJudge.
    """
    facts = {"host": urlsplit(url).netloc}
    answer = _post(url.rstrip("/") + "/chat/completions", request, limit_s)
    if isinstance(answer, str):
        return Reply(fault=answer, facts=facts)
    try:
        for name, key in (("model", "model"), ("fingerprint", "system_fingerprint")):
            if answer.get(key) is not None:
                facts[name] = str(answer[key])
        choice = answer["choices"][0]
        text, refusal = choice["message"]["content"], choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return Reply(fault="reply not readable: not a chat completion", facts=facts)
    if refusal or choice.get("finish_reason") == "content_filter":
        return Reply(
            fault="refused: " + str(refusal or "content filter")[:_MOST_SHOWN], facts=facts
        )
    if not isinstance(text, str):
        return Reply(fault="reply not readable: it has no text", facts=facts)
    return Reply(text, facts=facts)


def _post(url: str, body: Any, limit_s: float) -> Any:
    """Return the endpoint's answer, or why there is none. Raises CannotJudge."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("HYIMG_JUDGE_KEY"):
        headers["Authorization"] = "Bearer " + key
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(_NoRedirect)
    # All tries and their pauses end before the batch's limit.
    ends, why = time.monotonic() + max(0.1, limit_s - _RESERVE_S), ""
    for attempt in range(_RETRIES + 1):
        if attempt:
            time.sleep(min(2 ** (attempt - 1), limit_s / 20))
        left_s = max(0.1, ends - time.monotonic())
        try:
            with opener.open(request, timeout=left_s) as answer:
                return json.loads(answer.read(_MOST_REPLY))
        except urllib.error.HTTPError as error:
            why, said = f"HTTP {error.code}", _said(error)
            if error.code < 400 or error.code in (401, 403, 404):
                raise CannotJudge(url + " answers " + why + said) from None
            if error.code != 429 and error.code < 500:
                is_filter = any(word in said for word in _FILTERED)
                return ("refused: " if is_filter else "") + why + said
        except ValueError:
            return "reply not readable: not JSON"
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return f"no answer in {left_s:.0f} s"
            if isinstance(reason, ConnectionRefusedError):
                raise CannotJudge(url + ": " + str(reason)) from None
            why = str(reason)
    return why + f", {_RETRIES + 1} times"


def _said(error: urllib.error.HTTPError) -> str:
    """Return the message in an error's body, if it is the JSON that such endpoints send."""
    try:
        with error:
            found = json.loads(error.read(_MOST_REPLY))["error"]
        texts = [found] if isinstance(found, str) else [found.get("code"), found.get("message")]
        return "".join(": " + str(text)[:_MOST_SHOWN] for text in texts if text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
