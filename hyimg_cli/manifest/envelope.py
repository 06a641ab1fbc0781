"""The OpenAI batch envelope: a line whose body is a request to an image or video endpoint.

    {"custom_id": "a", "method": "POST", "url": "/v1/images/edits", "body": {"prompt": …, …}}

The endpoint sets the task; for videos, a start picture does too. A field of the body that hyimg
does not have is kept in the results unchanged (`x_user`), has no effect (`quality`: the result
line's `x_ignored` and a warning say so, unless the value asks for what hyimg does anyway), or is a
fault of the line. A `mask` is transparent where to edit.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from hyimg_cli.manifest.chat import CHAT, turn_of
from hyimg_cli.settings.values import BadValue, nearest, shown

KEYS = ("method", "url", "body")
# The tasks without pictures, and with them.
TASKS_OF_URL = {
    "/v1/images/edits": ("it2i", "it2i"),
    "/v1/images/generations": ("t2i", "t2i"),
    "/v1/videos": ("t2v", "i2v"),
    CHAT: ("t2t", "i2t"),
}
_PICTURES = {name: name for name in ("image", "images", "image_path")}
_PICTURES |= {"input_reference": "image_path"}
# Fields for the server only: they are copied to the result line and change no pixel.
_KEPT = ("user", "safety_identifier", "response_format")
# Options that change nothing here: the values that ask for what hyimg does anyway, and the others.
_OPTIONS: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "background": (("auto", "opaque"), ("transparent",)),
    "input_fidelity": (("high",), ("low",)),
    "moderation": (("auto", "low"), ()),
    "partial_images": ((0,), (1, 2, 3)),
    "quality": (("auto", "standard"), ("low", "medium", "high", "xhigh", "max", "hd")),
    "stream": ((False,), ()),
    "style": ((), ("vivid", "natural")),
}
# Names of all fields that belong to the API alone.
API_FIELDS = frozenset(_OPTIONS)
IGNORED = "x_ignored"
# Texts that may be empty; an empty text in any other field leaves it out.
_MAY_BE_EMPTY = ("prompt", "negative_prompt", "system_prompt", "cot_text")
_INSTEAD = {
    "extra_body": "move its fields into body",
    "seconds": "give num_frames and fps",
}


def unwrap(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line's own fields: the body, the task, and keys next to the envelope's keys.

    Raises BadValue, with the slug `openai-envelope`, if the envelope itself is wrong.
    """
    url, method, body = entry.get("url"), entry.get("method", "POST"), entry.get("body")
    if not isinstance(method, str) or method.upper() != "POST":
        raise _wrong(f"method is {shown(method)}", 'use "POST"')
    if not isinstance(url, str) or url not in TASKS_OF_URL:
        close = nearest(url, TASKS_OF_URL) if isinstance(url, str) else None
        hint = f"did you mean {close}?" if close else f"allowed: {', '.join(TASKS_OF_URL)}"
        raise _wrong(f"{shown(url)} is not an endpoint for pictures or videos", hint)
    tasks = TASKS_OF_URL[url]
    if not isinstance(body, dict):
        raise _wrong(f"body is {shown(body)}", "give the request's fields as an object")
    if url == CHAT and "messages" in body:
        try:
            body = turn_of(body)
        except BadValue as bad:
            raise _wrong(bad.what, bad.hint) from None
    if body.get("task", tasks[0]) not in tasks:
        names = " and ".join(dict.fromkeys(tasks))
        what = f"the endpoint is for {names}, but the body has task {shown(body['task'])}"
        raise _wrong(what, "remove task from the body")
    # Some clients send null to leave a field out.
    beside = {key: value for key, value in entry.items() if key not in KEYS and value is not None}
    if twice := sorted(beside.keys() & body.keys()):
        raise _wrong(f"{twice[0]} is given twice", "remove one of them")
    own: dict[str, Any] = {}
    for key, value in body.items():
        if is_left_out(key, value):
            continue
        if key in _INSTEAD:
            raise _wrong(f"{key} is not read", _INSTEAD[key])
        if key in _OPTIONS:
            # Types must be equal too: JSON's false is not its 0.
            usual, others = ([shown(one) for one in values] for values in _OPTIONS[key])
            if shown(value) in others:
                own.setdefault(IGNORED, {})[key] = value
            elif shown(value) not in usual:
                what = f"{key} is {shown(value)}, which hyimg does not support"
                raise _wrong(what, f"allowed: {', '.join(usual + others)}")
        elif key in _KEPT:
            own[f"x_{key}"] = value
        elif key == "mask":
            own |= _of_mask(value, own.keys() | body.keys())
        elif key in _PICTURES:
            is_list = isinstance(value, list)
            own[_PICTURES[key]] = [_path(one) for one in value] if is_list else _path(value)
        else:
            own[key] = value
    return beside | {"task": tasks[bool(own.keys() & _PICTURES.keys())]} | own


def is_left_out(name: str, value: Any) -> bool:
    """Return True for null and an empty text: some clients send them to leave a field out."""
    may_be_empty = name in _MAY_BE_EMPTY or name.startswith("x_")
    return value is None or (value == "" and not may_be_empty)


def warnings_of(copied: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each option that was ignored; `copied`: a job's `x_` keys."""
    ignored = copied.get(IGNORED)
    for name, value in ignored.items() if isinstance(ignored, dict) else ():
        yield f"{name} {shown(value)} has no effect"


def _of_mask(mask: Any, given: Container[str]) -> dict[str, Any]:
    """Return the line's fields for a mask. Raises BadValue."""
    path = _path(mask)
    if not isinstance(path, str):
        raise _wrong(
            f"mask is {shown(mask)}", "give the path of a picture, transparent where to edit"
        )
    if "region" in given:
        raise _wrong("both mask and region are set", "remove one of them")
    return {"keep_outside": True, "region": f"transparent:{path}", "region_mode": "auto"}


def _path(image: Any) -> Any:
    """Return the path in {"image_url": path} or {"image_url": {"url": path}}; others unchanged."""
    if not isinstance(image, dict) or image.keys() != {"image_url"}:
        return image
    inner = image["image_url"]
    return inner["url"] if isinstance(inner, dict) and inner.keys() == {"url"} else inner


def _wrong(what: str, hint: str) -> BadValue:
    return BadValue(what, hint, "openai-envelope")
