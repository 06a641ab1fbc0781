"""`hyimg manifest`: write pictures and prompts as a manifest."""

from pathlib import Path

import typer

from hyimg_cli.cli import inputs as given_inputs
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.manifest.edits import json_lines
from hyimg_cli.spec.units import counted


def manifest(
    ctx: typer.Context,
    inputs: list[str] | None = o.INPUTS,
    prompt: list[str] | None = o.PROMPT,
    task: str | None = o.TASK,
    recursive: bool = o.RECURSIVE,
    output: Path | None = o.output(
        "File to write; paths in it are relative to its folder. Default: standard output.",
    ),
    force: bool = o.switch("Overwrite an existing file.", "--force"),
    quiet: bool = o.QUIET,
) -> None:
    """Write a manifest from pictures and prompts, to edit and run.

    hyimg manifest photos --prompt "make the background white" > jobs.jsonl

    Without -o, paths are relative to the working folder, so save the file there. Jobs and ids are
    those that hyimg generate makes from the same pictures and prompts.
    """
    if not prompt:
        hint = 'for example: hyimg manifest photos --prompt "make the background white"'
        raise UsageError("no prompt is given", hint=hint, code="manifest.no-prompt")
    found, prompts = given_inputs.pictures_and_prompts(ctx.params, ctx.obj or ())
    if output is None:
        render.lines(json_lines(found, prompts, Path(), task).decode().rstrip("\n"))
        return
    if output.exists() and not force:
        hint = "overwrite it with --force"
        raise UsageError("the file already exists", where=output, hint=hint, code="usage.exists")
    data = json_lines(found, prompts, output.parent, task)
    with disk_errors(output.parent):
        replace_file(output, data)
    jobs = counted(data.count(b"\n"), "job")
    render.note_unless(quiet)(f"{output}: {jobs}")
