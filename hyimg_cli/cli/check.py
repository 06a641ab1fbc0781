"""`hyimg check`: find all faults of a manifest and of its files, without loading a model."""

from collections.abc import Sequence
from functools import partial

import typer

from hyimg_cli.cli import render
from hyimg_cli.cli.progress import show_remark
from hyimg_cli.cli.request import request_of
from hyimg_cli.engine.preparation import Refusals, preview
from hyimg_cli.engine.sources import faults
from hyimg_cli.errors import HyimgError
from hyimg_cli.loading.hub import stays_local
from hyimg_cli.scoring.best_of import first_run
from hyimg_cli.spec.units import counted

# The exit code if the run would start, but some of its lines or sources would fail.
SOME_FAIL = 1


@stays_local()
def check(ctx: typer.Context) -> None:
    """Check a manifest and report every error. Exit code 2 or 3: it would not run; 1: some source
    images are unreadable.
    """
    render.log_to_stderr(ctx.params["verbose"])
    style, request = render.style_of(ctx.params), request_of(ctx)
    refusals = Refusals(collects=True)
    with refusals.caught():
        request = first_run(request)
    ahead = preview(request, partial(show_remark, style=style), refusals)
    ready = ahead.preparation
    refused = [*refusals.found, *(fit.refusal() for fit in ahead.too_large.values())]
    of_lines = {id(one) for one in ready.faults}
    found = [*ready.faults, *faults(ready.sources, ready.jobs)]
    found += [one for one in refused if id(one) not in of_lines]
    _show(found, style)
    if style.as_json:
        render.json_line({"summary": {"jobs": len(ready.jobs), "faults": len(found)}})
    else:
        tell = render.note_unless(style.is_quiet)
        for text in ready.sources.sentences():
            tell(text)
        counts = f"{counted(len(ready.jobs), 'job')}, {counted(len(found), 'fault')}"
        tell(counts)
    raise typer.Exit(refused[0].exit_code if refused else SOME_FAIL if found else 0)


def _show(faults: Sequence[HyimgError], style: render.Style) -> None:
    """Print each fault, as JSON on stdout or as a message on stderr."""
    if not style.as_json:
        render.errors(faults)
        return
    for one in faults:
        facts = {"code": one.code, "message": one.what, "where": one.where, "hint": one.hint}
        render.json_line({"fault": facts})
