"""`hyimg report`: write the page of any run's folder."""

from pathlib import Path

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.selection import selected_in


def report(
    folder: Path = typer.Argument(metavar="OUT", help="Run folder: the -o of hyimg generate."),
    single_file: bool = o.switch(
        "Write a single HTML file with its pictures inside.", "--single-file"
    ),
    select: list[str] | None = o.SELECT_RESULTS,
    output: Path | None = o.output(
        "Path of the single file. Default: OUT/report-single.html, or with --select "
        "OUT/report-selected.html."
    ),
    max_mb: float = o.option(
        "Maximum size of the pictures in a single file, in MB.",
        default=24.0,
        show_default=True,
        min=0.0,
        metavar="<float>",
    ),
    quiet: bool = o.QUIET,
) -> None:
    """Write a run's report: report.html, or a single file to share or with selected jobs only.

    The run may still be in progress, or have lost files; the page shows that.
    """
    if output is not None and not (single_file or select):
        raise UsageError("-o needs --single-file", hint="add --single-file, or remove -o")
    # Imported here: help pages do not need it.
    if single_file or select:
        from hyimg_cli.report.single_file import single_file as page_in_one

        path = output or folder / ("report-selected.html" if select else "report-single.html")
        only = selected_in(folder, select) if select else None
        text = page_in_one(folder, most_mb=max_mb, only=only)
        with disk_errors(path.parent):
            replace_file(path, text.encode("utf-8", "backslashreplace"))
    else:
        from hyimg_cli.journal.journal import PAGE, RunFolder
        from hyimg_cli.report.run_page import RunPage

        path = folder / PAGE
        RunPage(folder).refresh(is_running=RunFolder(folder).is_locked)
    render.note_unless(quiet)(f"report: {path}")
