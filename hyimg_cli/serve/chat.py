"""The answer to a chat request, from the result line of its job."""

from collections.abc import Mapping
from typing import Any

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
