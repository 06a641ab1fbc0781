"""The OpenAI batch envelope: a line whose body is a request to an image or video endpoint.

    {"custom_id": "a", "method": "POST", "url": "/v1/images/edits", "body": {"prompt": …, …}}

The endpoint sets the task; for videos, a start picture does too. A field of the body that hyimg
does not have is kept in the results unchanged (`x_user`), accepted at its only possible value
(`quality`: auto), or a fault of the line.
"""

from collections.abc import Mapping
from typing import Any

from hyimg_cli.settings.values import BadValue, nearest, shown

KEYS = ("method", "url", "body")
# The tasks without pictures, and with them.
TASKS_OF_URL = {
    "/v1/images/edits": ("it2i", "it2i"),
    "/v1/images/generations": ("t2i", "t2i"),
    "/v1/videos": ("t2v", "i2v"),
}
_PICTURES = {name: name for name in ("image", "images", "image_path")}
_PICTURES |= {"input_reference": "image_path"}
# Fields for the server only: they are copied to the result line and change no pixel.
_KEPT = ("user", "response_format")
# Options of a server, with the values that ask for what hyimg does anyway.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "background": ("auto", "opaque"),
    "input_fidelity": ("high",),
    "moderation": ("auto", "low"),
    "partial_images": (0,),
    "quality": ("auto",),
    "stream": (False,),
}
_INSTEAD = {
    "extra_body": "move its fields into body",
    "mask": "write region, a box or the path of a mask",
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
        if value is None:
            continue
        if key in _INSTEAD:
            raise _wrong(f"{key} is not read", _INSTEAD[key])
        if key in _FIXED:
            # Types must be equal too: JSON's false is not its 0.
            if shown(value) not in (allowed := [shown(one) for one in _FIXED[key]]):
                what = f"{key} is {shown(value)}, which hyimg does not support"
                raise _wrong(what, f"allowed: {', '.join(allowed)}")
        elif key in _KEPT:
            own[f"x_{key}"] = value
        elif key in _PICTURES:
            is_list = isinstance(value, list)
            own[_PICTURES[key]] = [_path(one) for one in value] if is_list else _path(value)
        else:
            own[key] = value
    return beside | {"task": tasks[bool(own.keys() & _PICTURES.keys())]} | own


def _path(image: Any) -> Any:
    """Return the path in {"image_url": path} or {"image_url": {"url": path}}; others unchanged."""
    if not isinstance(image, dict) or image.keys() != {"image_url"}:
        return image
    inner = image["image_url"]
    return inner["url"] if isinstance(inner, dict) and inner.keys() == {"url"} else inner


def _wrong(what: str, hint: str) -> BadValue:
    return BadValue(what, hint, "openai-envelope")
