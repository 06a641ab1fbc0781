"""A scorer: a model behind an OpenAI-compatible chat endpoint judges pictures by a rubric.

The standard library alone, as it runs in a scorer's process. The endpoint's key is in the variable
HYIMG_JUDGE_KEY; it goes to the address that was given, and follows no redirection.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

SCORERS = {"judge": {"version": "1", "needs": ["prompt", "result"], "range": [0, 10]}}
_RETRIES, _PARTS = 4, ("follows", "preserves", "quality")
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_MOST_REPLY = 1_000_000


class CannotJudge(Exception):
    """The endpoint will answer no case: the address, the key or the model's name is wrong."""

    stops_scoring = True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_asked: Any) -> None:
        return None


def judge(cases: Any, options: Any) -> Any:
    """Return a score for each case; all are asked at the same time."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(partial(_judged, options=options), cases))


def _judged(case: Any, options: Any) -> Any:
    request = {
        "model": options["model"],
        "messages": [
            {"role": "system", "content": options["rubric"]},
            {"role": "user", "content": list(_content(case))},
        ],
        "temperature": 0,
        "max_tokens": 2048,
    }
    reply = _post(options["url"].rstrip("/") + "/chat/completions", request, options["limit_s"])
    if isinstance(reply, str):
        return {"value": None, "fault": reply}
    try:
        text = reply["choices"][0]["message"]["content"]
        # The last object in the answer, because some models think aloud first.
        found = json.loads(text[text.rindex("{") : text.rindex("}") + 1])
        parts = {name: found[name] for name in _PARTS if name in found}
        if not parts.keys() >= {"follows", "quality"}:
            raise ValueError("parts are missing")
        value = min(parts.values())
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return {"value": None, "fault": "reply not readable"}
    if not all(type(n) in (int, float) and 0 <= n <= 10 for n in parts.values()):
        return {"value": None, "fault": "reply not readable: a number is not from 0 to 10"}
    return {"value": value, "parts": parts, "reason": str(found.get("reason", ""))}


def _content(case: Any) -> Iterator[Any]:
    """Yield the request's parts: instruction, sources, result, each picture after its name."""
    yield {"type": "text", "text": "Instruction: " + case["prompt"]}
    pictures = [("Source image:", path) for path in case["sources"]]
    for name, path in [*pictures, ("Result image:", case["result"])]:
        with open(path, "rb") as file:
            data = file.read()
        kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)
        if kind is None:
            raise ValueError("not a PNG, JPEG or WebP: " + os.path.basename(path))
        url = "data:image/" + kind + ";base64," + base64.b64encode(data).decode()
        yield {"type": "text", "text": name}
        yield {"type": "image_url", "image_url": {"url": url}}


def _post(url: str, body: Any, limit_s: float) -> Any:
    """Return the endpoint's answer, or why there is none. Raises CannotJudge."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("HYIMG_JUDGE_KEY"):
        headers["Authorization"] = "Bearer " + key
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(_NoRedirect)
    # All tries and their pauses end before the batch's limit.
    each_s, why = max(0.1, (limit_s - 20) / (_RETRIES + 1)), ""
    for attempt in range(_RETRIES + 1):
        if attempt:
            time.sleep(min(2 ** (attempt - 1), limit_s / 20))
        try:
            with opener.open(request, timeout=each_s) as answer:
                return json.loads(answer.read(_MOST_REPLY))
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code}"
            if error.code < 400 or error.code in (401, 403, 404):
                raise CannotJudge(url + " answers " + why) from None
            if error.code != 429 and error.code < 500:
                return why
        except TimeoutError:
            why = f"no answer in {each_s:g} s"
        except (urllib.error.URLError, OSError) as error:
            why = str(getattr(error, "reason", error))
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                raise CannotJudge(url + ": " + why) from None
        except ValueError:
            return "reply not readable: not JSON"
    return why + f", {_RETRIES + 1} times"
