"""One turn of a conversation, as OpenAI's chat endpoint takes it: the fields of a line.

    {"messages": [{"role": "system", "content": …}, {"role": "user", "content": […]}], …}

The system message becomes `system_prompt`, the user's text `prompt`, and its pictures `images`, in
order: the models read pictures before the text, wherever they stand. Earlier turns are refused:
nothing released has been trained, or tested here, on more than one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hyimg_cli.settings.values import BadValue, shown

CHAT = "/v1/chat/completions"
# Names of the API, and ours.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# Fields of the API that ask for nothing, with the values that do.
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "logprobs": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "stream_options": (),
    "top_logprobs": (0,),
}
# Without chance, these choose nothing.
_OF_CHANCE = ("top_p", "top_k", "seed", "ar_seed")
FIELDS = frozenset({"messages", "model", "temperature", "choices", "metadata", "user", *_RENAMED})
FIELDS |= {*_IDLE, *_OF_CHANCE, "max_new_tokens", "bot_task"}


def turn_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat request's body as fields of a line. Raises BadValue, with the field first."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in FIELDS:
            raise BadValue(f"{name} is not a field of a question", "remove the field")
        if name in _IDLE:
            if value not in _IDLE[name]:
                raise BadValue(
                    f"{name} is {shown(value)}, which hyimg does not support", "remove it"
                )
            continue
        if name != "messages":
            fields[_RENAMED.get(name, name)] = value
    fields |= _messages(body.get("messages"))
    if not fields.get("temperature"):
        fields = {name: value for name, value in fields.items() if name not in _OF_CHANCE}
    return fields


def _messages(given: Any) -> dict[str, Any]:
    hint = "give one user message, after a system message if you like"
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise BadValue(f"messages is {shown(given)}", hint)
    roles = [one.get("role") for one in given]
    roles = ["system" if role == "developer" else role for role in roles]
    if roles not in (["user"], ["system", "user"]):
        raise BadValue(f"messages has the roles {', '.join(map(str, roles))}", hint)
    parts = [*_parts(given[-1].get("content"))]
    texts = [value for kind, value in parts if kind == "text"]
    found: dict[str, Any] = {"prompt": "\n".join(texts)}
    if images := [value for kind, value in parts if kind == "image_url"]:
        found["images"] = images
    if len(given) > 1:
        system = [*_parts(given[0].get("content"))]
        if any(kind != "text" for kind, _ in system):
            raise BadValue("messages has a picture in its system message", hint)
        if text := "\n".join(value for _, value in system):
            found["system_prompt"] = text
    return found


def _parts(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield a message's texts and pictures. Raises BadValue."""
    if isinstance(content, str):
        yield "text", content
        return
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image_url") or kind not in part:
            hint = "give texts, and pictures as image_url"
            raise BadValue(f"messages has {shown(part)} as a part", hint)
        value = part[kind]
        if kind == "text" and not isinstance(value, str):
            raise BadValue(f"messages has {shown(value)} as a text", "give a text")
        yield kind, value
