"""`hyimg think`: the text stage of a manifest's jobs alone, into a manifest for people to edit."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hyimg_cli.cli import inputs, render
from hyimg_cli.cli import options as o
from hyimg_cli.cli.carry_out import run_plan
from hyimg_cli.cli.progress import Report
from hyimg_cli.cli.selection import selection_of
from hyimg_cli.cli.sentences import toys
from hyimg_cli.cli.stopping import stoppable
from hyimg_cli.cli.views import view_of
from hyimg_cli.engine import runner
from hyimg_cli.engine.choice import placed, refuse_missing_device, replicas_of
from hyimg_cli.engine.eta import Eta
from hyimg_cli.errors import UsageError
from hyimg_cli.journal.texts_file import TextsFile
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.settings.panels import MODEL, RUN, SAMPLING
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import SETTINGS

# Of the settings that a run takes, those that only a picture's making or its folder reads.
_NOT_HERE = (
    "kv_reuse",
    "require_kv_reuse",
    "vae_use_tiling",
    "vae_dtype",
    "prewarm",
    "metadata",
    "report",
    "output_dir",
    "format",
    "quality",
    "lossless",
    "name",
)
_SETTINGS = tuple(
    row.name
    for row in SETTINGS.values()
    if row.panel in (RUN, MODEL, SAMPLING) and row.only != "videos" and row.name not in _NOT_HERE
)
_Output = Annotated[
    Path,
    o.option(
        "-o",
        "--output",
        panel=RUN,
        is_basic=True,
        parser=o.folder,
        metavar="<path>",
        help="File to write; what it has is not done again.",
    ),
]


@o.takes(*_SETTINGS)
def think(
    ctx: typer.Context,
    output: _Output,
    inputs: o.Inputs = None,
    prompt: o.Prompt = None,
    recursive: o.Recursive = False,
    recipe: o.Recipe = None,
    force: o.Force = False,
    select: o.Select = None,
    limit: o.Limit = None,
    shard: o.Shard = None,
    progress: o.Progress = "auto",
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    help_all: o.HelpAll = False,
) -> None:
    """Write the texts of a manifest's jobs, and draw nothing.

    The file is a manifest with a line for each job: read it, edit its cot_text, and generate draws
    from it; unedited, it draws the same pixels as without this step. A run that stopped goes on
    where it was. Exit codes as generate: 1 where some job failed, which then has no line.
    """
    render.log_to_stderr(verbose)
    raise typer.Exit(_carry_out(ctx.params, ctx.obj or ()))


def _carry_out(given: Mapping[str, Any], arguments: Sequence[str]) -> int:
    style, settings = render.style_of(given), o.settings_of(given)
    path: Path = given["output"]
    for name in given["inputs"] or ():
        _refuse_itself(name, path)
    accepted = runner.accept(inputs.manifest_of(given, settings), settings)
    config = placed(_config(o.run_config(settings, path.parent)))
    refuse_missing_device(config)
    jobs = selection_of(given).of(accepted.jobs, config.model.revision).jobs
    again = shlex.join(["hyimg", *(word for word in arguments if word != "--force")])
    with stoppable() as stopper, TextsFile(path, jobs) as file:
        left = runner.sift_texts(file, jobs, config, force=given["force"])
        file.drop([*left.to_write, *left.as_they_are])
        for job in left.as_they_are:
            file.append_as_is(job)
        plan = make_plan(left.to_write, runner.cards(config.model.revision))
        run = runner.PreparedRun(plan, left.done, (), accepted.invalid)
        counts = replace(runner.Summary.before(run), noun="text", done=len(left.as_they_are))
        render.remarks(toys(plan.jobs, settings), style)
        eta = Eta(plan, config)
        view = view_of(style, counts.left, eta, replicas=replicas_of(plan, config))
        with Report(counts, style, view, place=str(path), again=again, retry=again) as report:
            report.outcomes(accepted.invalid)
            if plan.jobs:
                run_plan(plan, file, config, stopper, [eta.add, report.show])
    return 1 if counts.failed or counts.invalid else 0


def _config(config: RunConfig) -> RunConfig:
    """That run without what only drawing needs."""
    return replace(
        config,
        output=replace(config.output, only_texts=True),
        batch=replace(config.batch, prewarm=False),
    )


def _refuse_itself(manifest: str, output: Path) -> None:
    """Raises UsageError where the texts would be written over the manifest."""
    there = manifest != "-" and os.path.exists(output) and os.path.exists(manifest)
    if there and output.samefile(manifest):
        what, hint = "the texts would be written into the manifest itself", "choose another -o"
        raise UsageError(what, where=output, hint=hint, code="usage.same-file")
