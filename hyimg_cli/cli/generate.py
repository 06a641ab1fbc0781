"""`hyimg generate`: the main job. Translates the command line; the engine does the work."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import inputs, render
from hyimg_cli.cli import options as o
from hyimg_cli.cli.plan import show_plan
from hyimg_cli.cli.progress import show_run
from hyimg_cli.cli.selection import resume_policy_of, selection_of
from hyimg_cli.cli.shard import left_whole
from hyimg_cli.engine.run import ManifestRun, RunRequest

NOT_AGAIN = ("--force", "--no-resume", "--retry-failed")


def generate(ctx: typer.Context) -> None:
    """Run the jobs, or with --dry-run plan them."""
    render.log_to_stderr(ctx.params["verbose"])
    if ctx.params["dry_run"]:
        raise typer.Exit(show_plan(ctx.params))
    style = render.style_of(ctx.params)
    render.remarks(left_whole(ctx.params["shard"]), style)
    raise typer.Exit(_run(ctx.params, ctx.obj or (), style))


def _run(given: Mapping[str, Any], arguments: Sequence[str], style: render.Style) -> int:
    settings = o.settings_of(given)
    selection, policy = selection_of(given), resume_policy_of(given)
    manifest = inputs.manifest_of(given, settings)
    folder = o.output_folder(given, settings, manifest.name)
    # A shard's folder is beside the one that is named.
    place = shown_place(o.output_folder({**given, "shard": None}, settings, manifest.name))
    config = o.run_config(settings, folder)
    run = ManifestRun(RunRequest(manifest, config, settings, selection, policy))
    del manifest  # of a million lines none is needed once they are jobs
    return show_run(
        run,
        style,
        again=_again(arguments, place),
        retry=_again(arguments, place, "--retry-failed"),
    )


def _again(arguments: Sequence[str], place: str, *more: str) -> str:
    """The command line that goes on with this run."""
    kept = [argument for argument in arguments if argument not in NOT_AGAIN]
    # Behind -- there are names alone.
    end = kept.index("--") if "--" in kept else len(kept)
    has_folder = any(a.startswith(("-o", "--output-dir")) for a in kept[:end])
    added = [*([] if has_folder else ["-o", place]), *more]
    return shlex.join(["hyimg", *kept[:end], *added, *kept[end:]])
