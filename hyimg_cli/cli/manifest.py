"""`hyimg manifest`: write pictures and prompts as a manifest."""

from dataclasses import replace
from pathlib import Path

import typer

from hyimg_cli.cli import inputs as given_inputs
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.manifest.edits import json_lines
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.units import counted

# Settings that its lines have, if they are given.
_OF_LINES = ("keep_outside", "region", "region_keeps")


@o.takes(*_OF_LINES)
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
    those that hyimg generate makes from the same pictures and prompts. With a folder of masks as
    --region, each line has its picture's mask.
    """
    if not prompt:
        hint = 'for example: hyimg manifest photos --prompt "make the background white"'
        raise UsageError("no prompt is given", hint=hint, code="manifest.no-prompt")
    settings = settle({name: ctx.params[name] for name in _OF_LINES}, {}, {})
    found, prompts = given_inputs.pictures_and_prompts(ctx.params, ctx.obj or (), settings)
    fields = {} if task is None else {"task": task}
    for name in _OF_LINES:
        if (one := settings[name]).origin == "flag" and name != "region":
            fields[name] = one.value
    if found is not None and (region := settings["region"].value):
        found = replace(found, regions=dict.fromkeys(found.files, region) | {**found.regions})
    if output is None:
        render.lines(json_lines(found, prompts, Path(), fields).decode().rstrip("\n"))
        return
    if output.exists() and not force:
        hint = "overwrite it with --force"
        raise UsageError("the file already exists", where=output, hint=hint, code="usage.exists")
    data = json_lines(found, prompts, output.parent, fields)
    with disk_errors(output.parent):
        replace_file(output, data)
    jobs = counted(data.count(b"\n"), "job")
    render.note_unless(quiet)(f"{output}: {jobs}")
