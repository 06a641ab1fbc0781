"""A run as a command line asks for it: manifest, settings, jobs, and the use of earlier results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.cli import inputs
from hyimg_cli.cli import options as o
from hyimg_cli.cli.shard import shard_named
from hyimg_cli.engine.runner import RunRequest, selection_of
from hyimg_cli.journal.resume import ResumePolicy
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.settings.config import Setting


def request_of(ctx: typer.Context, folder: Path | None = None) -> RunRequest:
    """Return the run of a command line; results go to `folder`, or the folder in its settings."""
    given: Mapping[str, Any] = ctx.params
    settings = o.settings_of(given)
    manifest = inputs.manifest_of(given, ctx.obj or (), settings)
    return request_for(given, settings, manifest, folder)


def request_for(
    given: Mapping[str, Any],
    settings: Mapping[str, Setting],
    manifest: Manifest,
    folder: Path | None = None,
) -> RunRequest:
    """Return the run of a manifest with the options of a command line."""
    policy = {name: given[name] for name in ("resume", "retry_failed", "force") if name in given}
    folder = folder or o.output_folder(settings, manifest.name)
    config = o.run_config(settings, folder)
    shard = shard_named(given["shard"])
    selection = selection_of(
        given["select"] or (), given["limit"], shard, folder, ResumePolicy(**policy)
    )
    return RunRequest(manifest, config, settings, *selection)
