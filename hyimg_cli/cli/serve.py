"""`hyimg serve`: an HTTP server for one loaded model."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import HyimgError, UsageError, require
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import shown

_option = partial(o.option, panel="Server", is_basic=True)
_number = partial(_option, metavar="<int>")
_SETTINGS = (
    name
    for name, row in SETTINGS.items()
    if (row.panel or "serve" in row.commands) and name != "output_dir"
)


@o.takes(*_SETTINGS)
def serve(
    ctx: typer.Context,
    host: str = _option(
        "Address to listen on; a public one requires an API key.",
        default="127.0.0.1",
        metavar="<host>",
    ),
    port: int = _number("Port to listen on; 0 picks a free one.", default=8000, min=0, max=65535),
    output_dir: Path | None = o.output(
        "Folder for files, batches and results. Default: runs/serve.",
        is_basic=True,
    ),
    api_key_file: Path | None = _option(
        "Read API keys from a file, one per line: NAME KEY or NAME sha256:DIGEST. HYIMG_API_KEY "
        "adds one.",
        metavar="<path>",
    ),
    served_model_name: list[str] | None = _option(
        "Name of the model for clients, such as gpt-image-1; its own stays valid. Repeat it for "
        "several.",
        metavar="<name>",
    ),
    allow_origin: list[str] | None = _option(
        "Let web pages of this origin (https://example.org, or * with an API key) send requests. "
        "Repeat it for several.",
        metavar="<origin>",
    ),
    max_waiting: int = _number(
        "Maximum waiting pictures of single requests; keys share it equally, and more get 429.",
        default=64,
        min=1,
        max=10_000,
    ),
    max_steps: int = _number("Maximum denoise steps of a request.", default=100, min=1, max=1000),
    grace: int = _number(
        "Seconds to finish single requests after SIGTERM.", default=30, min=0, max=3600
    ),
    recipe: Path | None = o.RECIPE,
    no_config: bool = o.NO_CONFIG,
    quiet: bool = o.QUIET,
    verbose: int = o.VERBOSE,
    help_all: bool = o.HELP_ALL,
) -> None:
    """Serve an OpenAI-compatible API: durable batches and single requests.

    The server loads the model once, and keeps files, batches and results in the output folder.
    After a kill, batches resume when you start it again. It takes the settings of generate, as
    defaults for requests. It prints one line of JSON per request. SIGTERM or Ctrl-C lets running
    requests finish; a second one stops at once.
    """
    require("starlette", "uvicorn", "python_multipart", "prometheus_client", extra="serve")
    from hyimg_cli.serve.app import is_loopback
    from hyimg_cli.serve.keys import VARIABLE, read_keys

    render.log_to_stderr(verbose)
    settings = o.settings_of(ctx.params)
    state = Path(settings["output_dir"].value or "runs/serve")
    if address_of(state):
        what, hint = "the server must keep its files on this machine", "give a folder with -o"
        raise UsageError(what, where=shown_place(state), hint=hint, code="usage.not-served")
    keys = read_keys(api_key_file, os.environ)
    if not keys and not is_loopback(host):
        what = f"--host {host} lets other machines connect without an API key"
        hint = f"give --api-key-file, or set {VARIABLE}"
        raise UsageError(what, hint=hint, code="usage.no-key")
    origins = [_origin(one, has_keys=len(keys) > 0) for one in allow_origin or ()]
    # Set this before torch is imported: on a busy CPU, threads that spin while they wait make
    # loading ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from hyimg_cli.engine.service import Service
    from hyimg_cli.pipelines.failures import policy_of_server
    from hyimg_cli.serve.app import HttpServer, Server
    from hyimg_cli.serve.connections import raise_file_limit

    def log(line: Mapping[str, Any]) -> None:
        if not quiet:
            with suppress(HyimgError, OSError):
                render.json_line(line)

    config = o.run_config(settings, state)
    config = replace(config, failure=policy_of_server(config.failure))
    raise_file_limit()
    with _listen(host, port) as listener:
        limits = {name: ctx.params[name] for name in ("host", "max_waiting", "max_steps", "grace")}
        limits |= {"names": served_model_name or (), "origins": origins}
        server = Server(Service(config), settings, config, state, keys, **limits, log=log)
        name, number = listener.getsockname()[:2]
        url = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        files = f"files in {shown_place(state)}"
        render.note_unless(quiet)(f"loading {server.model}; {url}, {files}")
        HttpServer(server).run(sockets=[listener])
        if server.fault is not None:
            raise server.fault


def _origin(text: str, *, has_keys: bool) -> str:
    """Return an origin as browsers write it. Raises UsageError."""
    if text == "*" and has_keys:
        return text
    with suppress(ValueError):
        parts = urlsplit(text.lower())
        is_plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        if parts.scheme in ("http", "https") and parts.hostname and is_plain and "*" not in text:
            default = parts.port == {"http": 80, "https": 443}[parts.scheme]
            place = parts.netloc.rpartition(":")[0] if default else parts.netloc
            return f"{parts.scheme}://{place}"
    what = f"--allow-origin {shown(text)} is not the origin of a web page"
    hint = "write https://example.org, or * with an API key"
    raise UsageError(what, hint=hint, code="usage.origin")


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises UsageError if that fails."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]
        what = f"cannot listen on {host}:{port}: {why}"
        raise UsageError(what, hint="choose another --port or --host", code="usage.port") from None
