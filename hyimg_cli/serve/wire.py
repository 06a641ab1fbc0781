"""Turns a request's fields into a manifest line.

Refuses everything that names a file, an address, a model or a program of the server before the
manifest sees it: pictures come with the request, or are files that its caller uploaded.
"""

import base64
import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from PIL import ImageChops

from hyimg_cli.files import json_of
from hyimg_cli.manifest.chat import CHAT, turn_of
from hyimg_cli.manifest.envelope import API_FIELDS, IGNORED, is_left_out, unwrap
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.media.carried import own_picture
from hyimg_cli.media.images import size_of
from hyimg_cli.media.masks import are_alike
from hyimg_cli.serve.chat import MODEL
from hyimg_cli.serve.errors import Refused, bad_request, too_large
from hyimg_cli.serve.uploads import Upload, Uploads
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.kinds import ANY_TEXT, TEXT
from hyimg_cli.settings.paths import REGION, PathKind
from hyimg_cli.settings.table import TABLES
from hyimg_cli.settings.values import BadValue, shown
from hyimg_cli.spec.job import Size

# The endpoints for pictures, and the names of their streamed events.
EVENTS = {
    "/v1/images/generations": "image_generation.completed",
    "/v1/images/edits": "image_edit.completed",
}
MOST_RESULTS = 10
# The fields of a line that a request may set. None of them can name a file. Free-text settings
# could, so only the safe ones are listed.
_OWN = {"prompt", "width", "height", "task", "metadata", "crop"}
_OWN |= {"cot_text", "cot_token_ids", "ratio_index", "choices"}
_SETTINGS = {
    name
    for table in ("sampling", "outside")
    for name, row in TABLES[table].items()
    if row.in_line
    and row.concerns("pictures", denoises_latents=True)
    and not isinstance(row.kind, PathKind)
    if name in ("negative_prompt", "system_prompt") or row.kind.schema not in (TEXT, ANY_TEXT)
}
ALLOWED = frozenset(_OWN | _SETTINGS | {"region", "format", "quality", "lossless"})
# Read here, or by the envelope.
_OF_THE_API = ("image", "images", "mask", "model", *API_FIELDS)
_LINE_BYTES = 1_000_000
# A data URL's media type and parameters do not matter: its bytes say what it is.
_DATA = re.compile(r"\s*data:(?P<type>[^,]{0,200}),", re.ASCII | re.IGNORECASE)
_IS_BASE64 = re.compile(r";\s*base64\s*$", re.ASCII | re.IGNORECASE)
_FILE_ID = re.compile(r"file-[\w-]{1,100}", re.ASCII)
# Keys that clients put around a picture, and the kinds that they name.
_AROUND = ("image_url", "url", "file_id")
_BESIDE = {"type", "detail"}


@dataclass(frozen=True)
class Wire:
    """What requests may ask of one server.

    The names of its model, that model's number of source pictures, the number of denoise steps; the
    store of uploads; the server's settings.
    """

    models: frozenset[str]
    most_images: int
    most_steps: int
    uploads: Uploads
    settings: Mapping[str, Setting]

    def line_of(self, endpoint: str, body: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """Return a request's manifest line, without `custom_id`; pictures are paths of uploads.

        Raises Refused.
        """
        named = body.get("model")
        if endpoint == CHAT:
            try:
                body = turn_of(body)
            except BadValue as bad:
                param = bad.what.partition(" ")[0]
                raise bad_request(param, bad.what, f"manifest.{bad.slug}", bad.hint) from None
        fields = {
            name: typed(name, value) for name, value in body.items() if not is_left_out(name, value)
        }
        if fields.get("seed") == -1:  # other servers' word for any seed
            del fields["seed"]
        for name in fields:
            known = BY_NAME.get(name)
            is_ours = known is None or known.name in ALLOWED or name in _OF_THE_API
            if not is_ours or name == "input_reference":
                what, hint = f"requests cannot set {shown(name)}", "remove the field"
                raise bad_request(name, what, "manifest.refused-field", hint)
        self._check_limits(fields)
        files, nbytes = self._take_pictures(fields, owner), 0
        for name, value in fields.items():
            try:
                nbytes += len(name) + len(json.dumps(value))
            except TypeError:
                what = f"{name} does not take a file"
                raise bad_request(name, what, "manifest.wrong-type") from None
        if nbytes > _LINE_BYTES:
            raise too_large("the request without its pictures", _LINE_BYTES)
        try:
            line = unwrap({"url": endpoint, "body": fields})
        except BadValue as bad:
            # The message begins with the field.
            param = next((name for name in fields if bad.what.startswith(f"{name} ")), "")
            raise bad_request(param, bad.what, f"manifest.{bad.slug}", bad.hint) from None
        asked = line.get("x_response_format", "b64_json")
        if asked not in ("b64_json", "url"):
            what, hint = f"response_format is {shown(asked)}", "allowed: b64_json, url"
            raise bad_request("response_format", what, "manifest.bad-value", hint)
        self._ignore_compression(line)
        if "region" in files:
            _ignore_size(line, files["images"][0])
        if endpoint == CHAT:
            own = {MODEL: named or min(self.models, default="")}
            return line | files | own | {"task": "i2t" if files else "t2t"}
        for alias in BY_NAME["n"].aliases:
            if alias in line:
                line["n"] = line.pop(alias)
        return {"n": 1} | line | files

    def _ignore_compression(self, line: dict[str, Any]) -> None:
        """Ignore a compression where the file has none; 100, OpenAI's default, asks for nothing."""
        kind = line.get("output_format", line.get("format", self.settings["format"].value))
        if kind == "png" and line.get("output_compression", 100) != 100:
            ignored = {"output_compression": line.pop("output_compression")}
            line[IGNORED] = line.get(IGNORED, {}) | ignored

    def _check_limits(self, fields: dict[str, Any]) -> None:
        """Check the server's own limits, and take the model out. Raises Refused."""
        model = fields.pop("model", None)
        if model is not None and (not isinstance(model, str) or model not in self.models):
            what, hint = f"{shown(model)} is not served", f"use {' or '.join(sorted(self.models))}"
            raise Refused(404, what, param="model", hint=hint, code="model_not_found")
        limits = {"n": MOST_RESULTS, "num_inference_steps": self.most_steps}
        for name, value in fields.items():
            most = limits.get(BY_NAME[name].name) if name in BY_NAME else None
            if most is None:
                continue
            what, code = f"{name} is {shown(value)}", "manifest.out-of-range"
            try:
                count = BY_NAME[name].kind.read(value)
                if 1 <= count <= most:
                    fields[name] = count  # 2 for 2.0: a batch's ids depend on it
                    continue
            except BadValue as bad:
                if bad.slug == "wrong-type":
                    what, code = bad.what, "manifest.wrong-type"
            raise bad_request(name, what, code, f"this server allows 1 to {most}")
        if "region" in fields:
            with suppress(BadValue):
                if not any(map(REGION.is_path, REGION.names(REGION.read(fields["region"])))):
                    return
            what = f"{shown(fields['region'])} is not a box"
            hint = "give LEFT,TOP,RIGHT,BOTTOM in pixels of the source, or send a mask"
            raise bad_request("region", what, "manifest.bad-value", hint)

    def _take_pictures(self, fields: dict[str, Any], owner: str) -> dict[str, Any]:
        """Take pictures and mask out of a request's fields, and return the line's fields for them.

        Raises Refused.
        """
        param = "image" if "image" in fields else "images"
        if {"image", "images"} <= fields.keys():
            raise bad_request(param, "both image and images are set", "manifest.duplicate-field")
        given = fields.pop(param, [])
        given = [one for one in (given if isinstance(given, list) else [given]) if one is not None]
        if len(given) > self.most_images:
            what = f"{len(given)} pictures; the model's limit is {self.most_images}"
            raise bad_request(param, what, "manifest.too-many-images")
        paths = [self._picture(one, param, owner) for one in given]
        found: dict[str, Any] = {"images": [str(path) for path in paths]} if paths else {}
        if "mask" not in fields:
            return found
        if {"region", "region_mode", "region_keeps"} & fields.keys():
            raise bad_request("mask", "both mask and region are set", "manifest.conflict")
        mask = fields.pop("mask")
        if isinstance(mask, list):  # of a form
            if len(mask) != 1:
                what = f"{len(mask)} masks; a request has one"
                raise bad_request("mask", what, "manifest.wrong-type")
            mask = mask[0]
        mask = self._picture(mask, "mask", owner)
        if not paths:
            raise bad_request("mask", "the mask has no image", "manifest.conflict")
        region = str(self._region_of(mask, paths[0]))
        return found | {"keep_outside": True, "region": region, "region_mode": "auto"}

    def _picture(self, given: Any, param: str, owner: str) -> Path:
        """Return the path of a request's picture: part of a form, upload or data URL.

        Raises Refused.
        """
        for _ in _AROUND:  # {"type": "input_image", "image_url": {"url": …, "detail": …}}
            if isinstance(given, dict) and len(inner := given.keys() - _BESIDE) == 1:
                (key,) = inner
                given = given[key] if key in _AROUND else given
        try:
            if isinstance(given, Upload):
                return self.uploads.checked(given.path)
            if isinstance(given, str) and _FILE_ID.fullmatch(given):
                file = self.uploads.find(given, owner)
                return self.uploads.checked(self.uploads.path_of(file))
            if isinstance(given, str) and (data := _data_in(given)) is not None:
                return self.uploads.checked(self.uploads.keep(io.BytesIO(data)).path)
        except ValueError as error:
            what = f"the data URL is not base64: {error}"
            raise bad_request(param, what, "manifest.bad-value") from None
        except Refused as refused:  # the uploads do not know the field
            refused.param = param
            raise
        what = f"{shown(given)} is not a picture that this server reads"
        hint = "send a data URL, the id of an uploaded file, or a form"
        raise bad_request(param, what, "manifest.not-served", hint)

    def _region_of(self, mask: Path, source: Path) -> Path:
        """Return a mask as a region, white where the mask is transparent. Raises Refused."""
        with self.uploads.decoding:
            own, size = own_picture(mask)[0], size_of(str(source))
        if not are_alike(Size(own.height, own.width), size):
            what = f"the mask is {own.width}x{own.height} and its image {size}"
        elif own.mode not in ("RGBA", "LA"):
            what = "the mask has no alpha channel"
        else:
            region = ImageChops.invert(own.getchannel("A"))
            if int(region.getextrema()[1]) > 127:  # type: ignore[arg-type]
                kept = io.BytesIO()
                region.save(kept, "PNG")
                return self.uploads.keep(kept).path
            what = "the mask is not transparent anywhere"
        hint = "make it transparent where to edit, in the shape of the first image"
        raise bad_request("mask", what, "source.region", hint)


def _ignore_size(line: dict[str, Any], image: str) -> None:
    """Ignore another size than that of the masked image, which the result has.

    Clients of OpenAI's API send a size with every request.
    """
    with suppress(BadValue):
        asked = BY_NAME["size"].kind.read(line.get("size", "auto"))
        if not asked.is_auto and str(asked) != str(size_of(image)):
            line[IGNORED] = line.get(IGNORED, {}) | {"size": line.pop("size")}


def typed(name: str, value: Any) -> Any:
    """Return the JSON value that a field expects, if a text has it: 1 for "1"; else the value."""
    if not isinstance(value, str):
        return value
    known = BY_NAME.get(name)
    if known is not None and name not in API_FIELDS:
        with suppress(BadValue):
            known.kind.read(value)
            return value
    elif name not in ("stream", "partial_images"):
        return value
    with suppress(ValueError):
        return json_of(value)
    return value


def _data_in(text: str) -> bytes | None:
    """Return the bytes of a data URL (RFC 2397), or None for another text. Raises ValueError.

    Base64 may have line breaks, the alphabet for URLs, percent escapes, or no padding.
    """
    head = _DATA.match(text)
    if head is None:
        return None
    body = unquote_to_bytes(text[head.end() :])
    if not _IS_BASE64.search(head["type"]):
        return body
    plain = b"".join(body.split()).translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
