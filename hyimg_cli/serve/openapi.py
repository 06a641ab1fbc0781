"""The OpenAPI document of a server, made of its routes and of the fields that a line may have."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field, create_model
from starlette.routing import Route

from hyimg_cli import __version__
from hyimg_cli.manifest.fields import FIELDS
from hyimg_cli.manifest.schema import json_schema
from hyimg_cli.serve.wire import ALLOWED, MOST_RESULTS

_TEXT, _FILE = {"type": "string"}, {"type": "string", "format": "binary"}
_PICTURE = {
    "description": "A data URL, or the id of an uploaded file.",
    "type": ["string", "object"],
}
_OF_A_BATCH = ("input_file_id", "endpoint", "completion_window")
_ERROR = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
_ERRORS = {
    status: {
        "description": text,
        "content": {
            "application/json": {
                "schema": {"type": "object", "properties": {"error": {"properties": _ERROR}}}
            }
        },
    }
    for status, text in (("4XX", "The request is refused."), ("5XX", "The server could not."))
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    asked = _fields_of_a_line()
    edit = asked | {"image": _PICTURE, "images": {"type": "array", "items": _PICTURE}}
    form = asked | {"image": _FILE, "image[]": {"type": "array", "items": _FILE}, "mask": _FILE}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/images/generations": {"application/json": _object(asked, "prompt")},
        "/v1/images/edits": {
            "application/json": _object(edit | {"mask": _PICTURE}, "prompt"),
            "multipart/form-data": _object(form, "prompt"),
        },
        "/v1/files": {
            "multipart/form-data": _object({"file": _FILE, "purpose": _TEXT}, "file", "purpose")
        },
        "/v1/batches": {
            "application/json": _object(dict.fromkeys(_OF_A_BATCH, _TEXT), *_OF_A_BATCH)
        },
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        names = re.findall(r"{(\w+)}", path)
        told: dict[str, Any] = {
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
            ],
            "responses": {"200": {"description": "Done."}} | _ERRORS,
        }
        for method in sorted((route.methods or set()) - {"HEAD"}):
            content = bodies.get(path) if method == "POST" else None
            body = {"requestBody": {"required": True, "content": content}} if content else {}
            paths.setdefault(path, {})[method.lower()] = told | body
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hyimg serve", "version": __version__},
        "security": [{"key": []}],
        "components": {"securitySchemes": key},
        "paths": paths,
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"schema": {"type": "object", "properties": properties, "required": required}}


def _fields_of_a_line() -> dict[str, Any]:
    """The properties of a request for pictures."""
    fields: dict[str, Any] = {
        name: (field.kind.annotation, Field(None, description=field.help))
        for field in FIELDS
        if field.name in ALLOWED - {"quality"}
        for name in (field.name, *field.aliases)
    }
    found = json_schema(create_model("Request", **fields))["properties"]
    for schema in found.values():
        del schema["default"]  # which is none: it may be left out
    counted = {"n": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS}}
    words = {"model": _TEXT, "user": _TEXT, "response_format": {"enum": ["b64_json", "url"]}}
    return {**found, **counted, **words, "stream": {"type": "boolean"}}
