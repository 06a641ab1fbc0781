"""`hyimg generate`: run the jobs of a manifest. Translates the command line for the engine."""

import shlex
from collections.abc import Sequence

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import render
from hyimg_cli.cli.picks import show_best_of, show_found_regions
from hyimg_cli.cli.plan import show_plan
from hyimg_cli.cli.progress import show_run
from hyimg_cli.cli.request import request_of
from hyimg_cli.cli.shard import remark_unsplit
from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.scoring.found_regions import finds_regions

NOT_AGAIN = ("--force", "--no-resume", "--retry-failed")


def generate(ctx: typer.Context) -> None:
    """Run the jobs in a manifest, or edit pictures with a prompt. Run the same command again to
    resume.

    \b
    hyimg generate quickstart
    hyimg generate photos --prompt "on white" --keep-outside
    hyimg generate jobs.jsonl --model ./checkpoint -o out
    """
    render.log_to_stderr(ctx.params["verbose"])
    if ctx.params["dry_run"]:
        raise typer.Exit(show_plan(ctx))
    style = render.style_of(ctx.params)
    render.remarks(remark_unsplit(ctx.params["shard"]), style)
    if ctx.params["follow"]:
        raise typer.Exit(_follow(ctx, style))
    request = request_of(ctx)
    drawn_again = shlex.join(["hyimg", *(word for word in ctx.obj or () if word not in NOT_AGAIN)])
    if request.config.candidates.score or request.config.candidates.draft_steps:
        raise typer.Exit(show_best_of(request, style, again=drawn_again))
    if finds_regions(request):
        raise typer.Exit(show_found_regions(request, style, again=drawn_again))
    place = shown_place(request.config.output.folder)
    again = _resume_command(ctx.obj or (), place)
    retry = _resume_command(ctx.obj or (), place, "--retry-failed")
    raise typer.Exit(show_run(ManifestRun(request), style, again=again, retry=retry))


def _follow(ctx: typer.Context, style: render.Style) -> int:
    from hyimg_cli.cli.follow import show_followed

    again = shlex.join(["hyimg", *(word for word in ctx.obj or () if word not in NOT_AGAIN)])
    return show_followed(ctx, style, again=again, retry=f"{again} --retry-failed")


def _resume_command(arguments: Sequence[str], place: str, *more: str) -> str:
    """Return the command line that resumes this run."""
    kept = [argument for argument in arguments if argument not in NOT_AGAIN]
    # After --, all arguments are names.
    end = kept.index("--") if "--" in kept else len(kept)
    has_folder = any(a.startswith(("-o", "--output")) for a in kept[:end])
    added = [*([] if has_folder else ["-o", place]), *more]
    return shlex.join(["hyimg", *kept[:end], *added, *kept[end:]])
