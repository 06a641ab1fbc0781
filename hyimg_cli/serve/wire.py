"""A request's fields as a manifest line, and result lines as the body of a response.

Whatever names a file, an address, a model or a program of the server is refused here, before the
manifest sees it: pictures come with the request, or are files that its caller uploaded.
"""

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from hyimg_cli.errors import HyimgError, MachineError, ManifestError
from hyimg_cli.files import json_of
from hyimg_cli.manifest.envelope import unwrap
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.media.carried import own_picture
from hyimg_cli.serve.errors import Refused, error_body, status_of
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.settings.kinds import ANY_TEXT, TEXT
from hyimg_cli.settings.paths import REGION, PathKind
from hyimg_cli.settings.table import TABLES
from hyimg_cli.settings.values import BadValue, shown

# What the streamed events of an endpoint are called.
EVENTS = {
    "/v1/images/generations": "image_generation.completed",
    "/v1/images/edits": "image_edit.completed",
}
MOST_RESULTS = 10
# Fields of a line that a request may hold besides its sampling: what it asks for, never where
# anything is. A setting that is free text could name something, so that each is named here.
_OWN = {"prompt", "width", "height", "task", "metadata", "cot_text", "cot_token_ids", "ratio_index"}
_TEXTS = {"negative_prompt", "system_prompt"}
_SETTINGS = {
    name
    for table in ("sampling", "outside")
    for name, row in TABLES[table].items()
    if row.in_line and row.only != "videos" and not isinstance(row.kind, PathKind)
    if name in _TEXTS or row.kind.schema not in (TEXT, ANY_TEXT)
}
ALLOWED = frozenset(_OWN | _SETTINGS | {"region", "format", "quality", "lossless"})
# Read here, or by the envelope.
_OF_THE_API = ("image", "images", "mask", "model", "quality")
_DATA = re.compile(r"data:image/[A-Za-z0-9.+-]{1,40};base64,", re.ASCII)
_IN_FORM = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_NO_PLACE = "pictures are data URLs, ids of uploaded files, or parts of a form"


@dataclass(frozen=True)
class Wire:
    """What requests may ask of one server: the names of its model, the pictures that this takes,
    the denoise steps that a job may have, and where pictures are kept.
    """

    models: tuple[str, ...]
    most_images: int
    most_steps: int
    uploads: Uploads

    def line_of(self, endpoint: str, body: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """The manifest line that a request stands for, without `custom_id`; its files are named by
        where the server keeps them. Raises Refused.
        """
        if endpoint not in EVENTS:
            what = f"{shown(endpoint)} is not an endpoint of this server"
            hint = f"known: {', '.join(EVENTS)}"
            raise Refused(400, what, param="endpoint", hint=hint, code="request.endpoint")
        fields = {name: value for name, value in body.items() if value is not None}
        for name in fields:
            known = BY_NAME.get(name)
            is_ours = known is None or known.name in ALLOWED or name in _OF_THE_API
            if not is_ours or name == "input_reference":
                what = f"{shown(name)} cannot be set by a request"
                hint = "remove the field"
                raise Refused(400, what, param=name, hint=hint, code="manifest.refused-field")
        self._check_limits(fields)
        files = self._take_files(fields, owner)
        try:
            line = unwrap({"url": endpoint, "body": fields})
        except BadValue as bad:
            # The field stands first in its sentence.
            param = next((name for name in fields if bad.what.startswith(f"{name} ")), "")
            code = f"manifest.{bad.slug}"
            raise Refused(400, bad.what, param=param, hint=bad.hint, code=code) from None
        if line.get("x_response_format", "b64_json") not in ("b64_json", "url"):
            what = f"response_format is {shown(line['x_response_format'])}"
            hint = "allowed: b64_json, url"
            raise Refused(400, what, param="response_format", hint=hint, code="manifest.bad-value")
        return {"n": 1} | line | files

    def _check_limits(self, fields: dict[str, Any]) -> None:
        """Check the server's own limits; takes the model out. Raises Refused."""
        model = fields.pop("model", self.models[0])
        if model not in self.models:
            what, hint = f"{shown(model)} is not served", f"served: {', '.join(self.models)}"
            raise Refused(404, what, param="model", hint=hint, code="model_not_found")
        names = {"n": MOST_RESULTS, "num_inference_steps": self.most_steps}
        for name, value in fields.items():
            most = names.get(BY_NAME[name].name) if name in BY_NAME else None
            if most is not None and type(value) is int and value > most:
                what = f"{name} is {value}, and this server takes {most} at most"
                raise Refused(400, what, param=name, code="manifest.out-of-range")
        if "region" in fields:
            with suppress(BadValue):
                if not REGION.is_path(REGION.read(fields["region"])):
                    return
            hint = "give LEFT,TOP,RIGHT,BOTTOM in the source's pixels, or a mask"
            what = f"{shown(fields['region'])} is not a box"
            raise Refused(400, what, param="region", hint=hint, code="manifest.bad-value")

    def _take_files(self, fields: dict[str, Any], owner: str) -> dict[str, Any]:
        """Take pictures and mask out of a request's fields: the fields of a line that stand for
        them. Raises Refused.
        """
        names = [name for name in ("image", "images") if name in fields]
        if len(names) > 1:
            raise Refused(
                400, "image beside images", param="image", code="manifest.duplicate-field"
            )
        given = fields.pop(names[0]) if names else []
        given = given if isinstance(given, list) else [given]
        if len(given) > self.most_images:
            what = f"{len(given)} pictures, and the model takes {self.most_images} at most"
            raise Refused(400, what, param=names[0], code="manifest.too-many-images")
        paths = [self._picture(one, names[0], owner) for one in given]
        found: dict[str, Any] = {"images": [str(path) for path in paths]} if paths else {}
        if "mask" in fields:
            if {"region", "region_mode"} & fields.keys():
                what = "mask beside region"
                raise Refused(400, what, param="mask", code="manifest.conflict")
            mask = self._picture(fields.pop("mask"), "mask", owner)
            if not paths:
                raise Refused(400, "mask without an image", param="mask", code="manifest.conflict")
            region = str(self._region_of(mask, paths[0]))
            found |= {"keep_outside": True, "region": region, "region_mode": "instead"}
        return found

    def _picture(self, given: Any, param: str, owner: str) -> Path:
        """Where a picture of a request is kept: a file of its form, an upload or a data URL."""
        try:
            if isinstance(given, Path):
                return self.uploads.checked(given)
            if isinstance(given, dict) and given.keys() == {"image_url"}:
                given = given["image_url"]
            if isinstance(given, dict) and given.keys() == {"url"}:
                given = given["url"]
            if isinstance(given, dict) and given.keys() == {"file_id"}:
                return self.uploads.picture(str(given["file_id"]), owner)
            if isinstance(given, str) and (head := _DATA.match(given)):
                data = base64.b64decode(given[head.end() :], validate=True)
                return self.uploads.keep_picture(data)
        except binascii.Error as error:
            what = f"the data URL is not base64: {error}"
            raise Refused(400, what, param=param, code="manifest.bad-value") from None
        except Refused as refused:  # by whoever looked at the file, without the field
            refused.param = param
            raise
        what = f"{shown(given)} is not a picture that this server reads"
        raise Refused(400, what, param=param, hint=_NO_PLACE, code="manifest.not-served")

    def _region_of(self, mask: Path, source: Path) -> Path:
        """A mask as a region: white where it is clear. Raises Refused."""
        own, size = own_picture(mask)[0], own_picture(source)[0].size
        what, hint = "", "make it clear where to edit, in the size of the first image"
        if own.size != size:
            sides = " and its image ".join(f"{one[0]}x{one[1]}" for one in (own.size, size))
            what = f"the mask is {sides}"
        elif own.mode not in ("RGBA", "LA"):
            what = "the mask has no alpha"
        else:
            region = ImageChops.invert(own.getchannel("A"))
            if int(region.getextrema()[1]) > 127:  # type: ignore[arg-type]
                kept = io.BytesIO()
                Image.merge("L", [region]).save(kept, "PNG")
                return self.uploads.keep_picture(kept.getvalue())
            what = "the mask is clear nowhere"
        raise Refused(400, what, param="mask", hint=hint, code="source.region")


def fields_of_form(
    fields: Iterable[tuple[str, str]], files: Iterable[tuple[str, Path]]
) -> dict[str, Any]:
    """A form's parts as the fields of a JSON body: `metadata[a]` as an object, `image[]` as a list,
    and text as the number, truth or list that its field reads. Raises Refused.
    """
    body: dict[str, Any] = {}
    parts: list[tuple[str, str | Path]] = [*fields, *files]
    for name, value in parts:
        written = _IN_FORM.fullmatch(name)
        if written is None:
            raise Refused(400, f"{shown(name)} is not a field", param=name, code="request.bad-form")
        keys = [written[1], *re.findall(r"\[([^\[\]]*)\]", written[2])]
        is_list = keys[-1] == "" and len(keys) > 1
        place: Any = body
        for key in keys[: -2 if is_list else -1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        last = keys[-2] if is_list else keys[-1]
        if not isinstance(place, dict) or "" in keys[:-1]:
            raise Refused(400, f"{shown(name)} is not a field", param=name, code="request.bad-form")
        typed = value if isinstance(value, Path) or len(keys) > 2 else _typed(keys[0], value)
        if is_list:
            place.setdefault(last, [])
            if isinstance(place[last], list):
                place[last].append(typed)
                continue
        elif last not in place:
            place[last] = typed
            continue
        raise Refused(400, f"{name} is there twice", param=name, code="manifest.duplicate-field")
    return body


def _typed(name: str, text: str) -> Any:
    """A form's text as its field reads it in JSON; as it is where nothing else fits."""
    known = BY_NAME.get(name)
    if known is not None:
        with suppress(BadValue):
            known.kind.read(text)
            return text
    elif name not in ("stream", "partial_images"):
        return text
    with suppress(ValueError):
        return json_of(text)
    return text


def refusal_of(error: HyimgError) -> Refused:
    """An error of a manifest or of a job as the refusal of its request."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ManifestError):
        error = error.faults[0]
    # Others' places are paths of the server.
    param = error.where.partition(": ")[2] if error.code.startswith("manifest.") else ""
    # What the machine refuses may pass with the server's next start.
    status = 503 if isinstance(error, MachineError) else status_of(error)
    return Refused(status, error.what, param=param, hint=error.hint, code=error.code)


def body_of(
    line: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    picture: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    created: int,
) -> dict[str, Any]:
    """The body that answers a line whose jobs are done, by their result lines in order. `picture`
    gives the file of an output: its `b64_json`, or its `url`.
    """
    outputs = [(entry, output) for entry in entries for output in entry["outputs"]]
    data = [
        {**picture(output), "revised_prompt": entry.get("cot_text")} for entry, output in outputs
    ]
    own = [
        {name: output[name] for name in ("seed", "pixel_sha256")} | {"warnings": entry["warnings"]}
        for entry, output in outputs
    ]
    sides = {f"{output['width']}x{output['height']}" for _, output in outputs}
    suffix = outputs[0][1]["path"].rpartition(".")[2] if outputs else "png"
    return {
        "created": created,
        "data": data,
        "size": sides.pop() if len(sides) == 1 else "auto",
        "quality": "auto",
        "background": "opaque",
        "output_format": "jpeg" if suffix == "jpg" else suffix,
        "usage": _usage(entries, len(line.get("images", ()))),
        "hyimg": own,
    }


def _usage(entries: Sequence[Mapping[str, Any]], images: int) -> dict[str, Any]:
    """Tokens of texts: a prompt's, with its pictures, and those that were written."""
    reuse = [entry.get("kv_reuse") or {} for entry in entries]
    read = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("prefill", "shared"))
    wrote = sum(one.get(f"ar_{kind}_tokens", 0) for one in reuse for kind in ("decode", "taken"))
    kinds = {"text_tokens": 0 if images else read, "image_tokens": read if images else 0}
    total = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
    return total | {"input_tokens_details": kinds}


def failed_body(
    line: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    picture: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    created: int,
) -> tuple[int, dict[str, Any]]:
    """The status and the body that answer a line of which a job failed; the others' results too."""
    done = [entry for entry in entries if entry["status"] == "done"]
    error = next(entry["error"] for entry in entries if entry["status"] != "done")
    message = error["message"]
    for number, path in enumerate(line.get("images", ()), 1):
        message = message.replace(path, f"image {number}")
    message = message.replace(line.get("region") or "\0", "the mask")
    body = error_body({**error, "message": message})
    return status_of(error), body | (
        {"data": body_of(line, done, picture, created)["data"]} if done else {}
    )
