"""The answer to a chat request: whole from its job's result line, or in chunks as it is written."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from hyimg_cli.serve.errors import Refused, bad_request, refusal_of
from hyimg_cli.settings.values import shown

if TYPE_CHECKING:
    from hyimg_cli.serve.online import OnlineRun

_HEARTBEAT_S = 10.0
# The model that the request named.
MODEL = "x_model"


def completion(line: Mapping[str, Any], entry: Mapping[str, Any], created: int) -> dict[str, Any]:
    """Return the body that answers a chat request, from its line and its job's result line.

    A text without an answer, of which `hyimg.warnings` says why, is empty.
    """
    reuse = entry.get("kv_reuse") or {}
    read = sum(reuse.get(f"ar_{kind}_tokens", 0) for kind in ("prefill", "shared"))
    wrote = len(entry.get("answer_token_ids") or ())
    own = {name: entry[name] for name in ("choices", "mass", "thought") if entry.get(name)}
    message = {"role": "assistant", "content": entry.get("answer") or "", "refusal": None}
    return {
        "id": f"chatcmpl-{entry['custom_id']}",
        "object": "chat.completion",
        "created": created,
        "model": line.get(MODEL, ""),
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "length" if entry.get("finish") == "length" else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": wrote,
            "total_tokens": read + wrote,
        },
        "hyimg": own | {name: entry.get(name, []) for name in ("warnings", "notes")},
    }


def stream_options(given: Any) -> Mapping[str, Any]:
    """Return the options of a stream, from a request's field. Raises Refused."""
    options = {} if given is None else given
    known = {"include_usage", "include_obfuscation"}
    if not isinstance(options, dict) or options.keys() - known:
        what, hint = f"stream_options is {shown(given)}", "it may have include_usage"
        raise bad_request("stream_options", what, "manifest.bad-value", hint)
    return options


async def chunks(run: "OnlineRun", base: str, *, has_usage: bool) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer while it is written, and its end; comments in between.

    `has_usage`: the last chunk has the tokens that were read and written.
    """
    name, sent = run.jobs[0].custom_id, ""
    head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": run.created}
    head["model"] = run.line.get(MODEL, "")

    def chunk(delta: Mapping[str, Any], end: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        return _data(head | {"choices": [choice]} | more)

    yield chunk({"role": "assistant", "content": ""})
    while name not in run.entries and not run.work.done():
        news, said = run.news, run.said.get(name, "")
        # A job that lacked memory begins again, and then writes the same.
        if len(said) > len(sent) and said.startswith(sent):
            yield chunk({"content": said[len(sent) :]})
            sent = said
            continue
        try:
            await asyncio.wait_for(news.wait(), _HEARTBEAT_S)
        except TimeoutError:
            yield b": at work\n\n"
    try:
        if run.error is not None:
            raise refusal_of(run.error)
        body = await run_in_threadpool(run.body, base, [name])
        whole = body["choices"][0]["message"]["content"]
        if not whole.startswith(sent):
            what = "the answer was written again, and differs from what was sent of it"
            raise Refused(500, what, hint="send the request again", code="output.rewritten")
    except Refused as refused:
        yield _data(refused.body())
        return
    if whole != sent:
        yield chunk({"content": whole[len(sent) :]})
    yield chunk({}, body["choices"][0]["finish_reason"], hyimg=body["hyimg"])
    if has_usage:
        yield _data(head | {"choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _data(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
