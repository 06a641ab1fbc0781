"""The OpenAPI document of a server, made from its routes and the fields of requests."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.routing import Route

from hyimg_cli import __version__
from hyimg_cli.manifest.chat import CHAT
from hyimg_cli.manifest.fields import BY_NAME
from hyimg_cli.manifest.schema import json_schema, line_model
from hyimg_cli.serve.batches import BatchRequest
from hyimg_cli.serve.uploads import Expiry, FileForm
from hyimg_cli.serve.wire import ALLOWED, MOST_RESULTS

_TEXT, _FILE = {"type": "string"}, {"type": "string", "format": "binary"}
_PICTURE = {
    "description": "A data URL, or the id of an uploaded file.",
    "type": ["string", "object"],
}
_ERROR = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
_ERROR_BODY = {"type": "object", "properties": {"error": {"properties": _ERROR}}}
_ERRORS = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_BODY}}}
    for status, text in (("4XX", "The request was refused."), ("5XX", "The server failed."))
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document of these routes."""
    bodies, paths = _bodies(), dict[str, dict[str, Any]]()
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT}
            for name in re.findall(r"{(\w+)}", path)
        ]
        shown = {"parameters": parameters, "responses": {"200": {"description": "Done."}} | _ERRORS}
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = shown
        if path in bodies and "POST" in (route.methods or ()):
            content = {kind: {"schema": schema} for kind, schema in bodies[path].items()}
            paths[path]["post"] = shown | {"requestBody": {"required": True, "content": content}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hyimg serve", "version": __version__},
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Expiry": Expiry.model_json_schema()},
        },
        "paths": paths,
    }


def _bodies() -> dict[str, dict[str, Any]]:
    """Return the schemas of bodies by route and content type."""
    fields = json_schema(line_model())["$defs"]["Pictures"]["properties"]
    known = ALLOWED - {"quality"}
    asked = {name: schema for name, schema in fields.items() if BY_NAME[name].name in known}
    asked |= {"n": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS}}
    asked |= {"model": _TEXT, "user": _TEXT, "stream": {"type": "boolean"}}
    asked |= {"response_format": {"enum": ["b64_json", "url"]}}
    edit = {"image": _PICTURE, "images": {"type": "array", "items": _PICTURE}, "mask": _PICTURE}
    form = {"image": _FILE, "image[]": {"type": "array", "items": _FILE}, "mask": _FILE}
    json, multipart = "application/json", "multipart/form-data"
    return {
        "/v1/images/generations": {json: _object(asked)},
        "/v1/images/edits": {json: _object(asked | edit), multipart: _object(asked | form)},
        CHAT: {json: _chat(asked)},
        "/v1/files": {multipart: _of_model(FileForm)},
        "/v1/batches": {json: _of_model(BatchRequest)},
    }


def _chat(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a chat request; `asked`: the schemas of pictures' fields."""
    message = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user"]}, "content": {}},
        "required": ["role", "content"],
    }
    sampling = {name: asked[name] for name in ("temperature", "top_p", "seed", "stream")}
    own = {"choices": {"type": "array", "items": _TEXT}, "max_tokens": asked["max_new_tokens"]}
    messages = {"type": "array", "items": message, "minItems": 1, "maxItems": 2}
    properties = {"model": _TEXT, "messages": messages} | sampling | own
    return {"type": "object", "properties": properties, "required": ["messages"]}


def _of_model(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {name: value for name, value in schema.items() if name != "$defs"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": ["prompt"]}
