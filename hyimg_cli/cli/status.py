"""`hyimg status`: show how far runs are, and what of them the user should look at."""

import shlex
from dataclasses import asdict
from pathlib import Path

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.journal.run_status import RunStatus, status_of

_RUNS = Path("runs")


def status(
    folders: list[Path] = typer.Argument(
        None,
        metavar="RUN",
        parser=o.place,
        show_default=False,
        help="Run folders or addresses: the -o of hyimg generate. Default: every run in runs.",
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Show how many jobs of a run are done, failed and left, why, and the command that goes on.

    Several runs get one line each. The exit code is 1 if a job failed, is left, or is beyond a
    gate.
    """
    names = folders or _in_runs()
    code = 0
    for folder in names:
        try:
            found = status_of(folder)
        except HyimgError as error:
            if len(names) == 1:
                raise
            render.error(error)
            code = max(code, error.exit_code)
            continue
        code = max(code, int(found.needs_attention))
        if as_json:
            render.json_line(_as_json(found))
        else:
            _show(found, is_alone=len(names) == 1)
    raise typer.Exit(code)


def _in_runs() -> list[Path]:
    """Return the runs in the folder `runs`. Raises UsageError if it has none."""
    if found := sorted(path for path in _RUNS.glob("*") if path.is_dir()):
        return found
    hint = "name the -o of hyimg generate: hyimg status OUT"
    raise UsageError("no run is given, and the folder runs has none", hint=hint)


def _show(found: RunStatus, *, is_alone: bool) -> None:
    reasons = [f"{count:,} {code}" for code, count in found.failed_by.most_common()]
    failed = f"{found.failed:,} failed"
    if reasons and not is_alone:
        failed += f" ({', '.join(reasons)})"
    parts = [f"{found.done:,} done", failed, f"{found.left:,} left", *found.edits.remarks]
    parts += [f"{found.warned:,} with warnings"] if found.warned else []
    running = "running, " if found.is_running else ""
    render.line(f"{shown_place(found.folder)}: {running}{', '.join(parts)}")
    if not is_alone:
        return
    for code, count in found.failed_by.most_common():
        render.line(f"  {count:,} failed: {code}")
    if found.failed_by:
        render.line(f"to see why: {shlex.join(['hyimg', 'explain', *found.failed_by])}")
    if again := found.next_command():
        render.line(f"to go on: {shlex.join(again)}")
    elif (found.left or found.failed) and not found.is_running:
        first = "correct the invalid lines, then " if found.invalid else ""
        render.line(f"to go on: {first}run its hyimg generate command again")


def _as_json(found: RunStatus) -> dict[str, object]:
    again = found.next_command()
    return {
        "done": found.done,
        "failed": found.failed,
        "left": found.left,
        "failed_by": dict(found.failed_by.most_common()),
        **asdict(found.edits),
        "warned": found.warned,
        "running": found.is_running,
        "next": shlex.join(again) if again else None,
        "output_dir": shown_place(found.folder),
    }
