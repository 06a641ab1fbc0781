"""A scorer: a model behind an OpenAI-compatible chat endpoint judges pictures by a rubric."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from hyimg_cli.scoring.endpoint import ask, picture_part

SCORERS = {"judge": {"version": "1", "needs": ["prompt", "result"], "range": [0, 10]}}
_PARTS, _MOST_SHOWN = ("follows", "preserves", "quality"), 300
_FIELDS = {"temperature": 0, "max_tokens": 2048}


def judge(cases: Any, options: Any) -> Iterator[Any]:
    """Yield a score for each case as its reply arrives; all are asked at the same time."""
    with ThreadPoolExecutor(len(cases)) as pool:
        asked = {pool.submit(_judged, case, options): n for n, case in enumerate(cases)}
        for one in as_completed(asked):
            yield {"case": asked[one]} | one.result()


# What was asked is paid for: a reply counts even if hyimg was killed before it came.
judge.keeps_replies = True  # type: ignore[attr-defined]


def _judged(case: Any, options: Any) -> Any:
    request = _FIELDS | {
        "model": options["model"],
        "messages": [
            {"role": "system", "content": options["rubric"]},
            {"role": "user", "content": list(_content(case))},
        ],
    }
    request |= options["fields"]
    request = {key: value for key, value in request.items() if value is not None}
    reply = ask(options["url"], request, options["limit_s"])
    facts = reply.facts | {
        "temperature": request.get("temperature", "default"),
        "template_sha256": options["template_sha256"],
    }
    return _score(reply.text, reply.fault) | {"facts": facts}


def _score(text: str, fault: str) -> dict[str, Any]:
    """Return the score in a reply's text; without one, the reason has the start of the text."""
    if fault:
        return {"value": None, "fault": fault}
    try:
        # The last object in the answer, because some models think aloud first.
        found = json.loads(text[text.rindex("{") : text.rindex("}") + 1])
        parts = {name: found[name] for name in _PARTS if name in found}
        missing = [name for name in ("follows", "quality") if name not in parts]
    except (TypeError, ValueError, AttributeError):
        unread = "reply not readable: no JSON object with the marks"
        return {"value": None, "fault": unread, "reason": text[:_MOST_SHOWN]}
    if missing:
        fault = "reply not readable: no " + " and no ".join(missing)
    elif not all(type(n) in (int, float) and 0 <= n <= 10 for n in parts.values()):
        fault = "reply not readable: a number is not from 0 to 10"
    if fault:
        return {"value": None, "fault": fault, "reason": text[:_MOST_SHOWN]}
    return {"value": min(parts.values()), "parts": parts, "reason": str(found.get("reason", ""))}


def _content(case: Any) -> Iterator[Any]:
    """Yield the request's parts: instruction, sources, result, each picture after its name."""
    yield {"type": "text", "text": "Instruction: " + case["prompt"]}
    pictures = [("Source image:", path) for path in case["sources"]]
    for name, path in [*pictures, ("Result image:", case["result"])]:
        with open(path, "rb") as file:
            part = picture_part(file.read(), os.path.basename(path))
        yield {"type": "text", "text": name}
        yield part
