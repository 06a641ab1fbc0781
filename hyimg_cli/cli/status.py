"""`hyimg status`: show how far a run is, and what of it the user should look at."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.journal.bucket import existing_run
from hyimg_cli.journal.edit_counts import EditCounts
from hyimg_cli.journal.past_run import past_jobs


def status(
    folder: Path = typer.Argument(
        metavar="RUN", parser=o.place, help="Run folder: the -o of hyimg generate."
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Show how many jobs of a run are done, failed and left, and which sources were not kept.

    The exit code is 1 if a job failed, is left, or is beyond a gate.
    """
    run = existing_run(folder)
    jobs, edits, codes, warned = Counter[str](), EditCounts(), Counter[str](), 0
    for job in past_jobs(folder):
        jobs[str(job.result.get("status", "left"))] += 1
        if job.is_done:
            edits.count_edit(job.result.get("edit"))
            warned += bool(job.result.get("warnings"))
        elif error := job.result.get("error"):
            codes[str(error.get("code"))] += 1
    is_running, place = run.is_locked, shown_place(folder)
    counts = {name: jobs[name] for name in ("done", "failed", "left")}
    if as_json:
        more = asdict(edits) | {"warned": warned, "running": is_running, "output_dir": place}
        render.json_line(counts | more)
    else:
        parts = [f"{count:,} {name}" for name, count in counts.items()]
        parts += [*edits.remarks, *([f"{warned:,} with warnings"] if warned else [])]
        render.line(f"{place}: {'running, ' if is_running else ''}{', '.join(parts)}")
        for code, count in codes.most_common():
            render.line(f"  {count:,} failed: {code}")
    raise typer.Exit(1 if jobs["failed"] or jobs["left"] or edits.gated else 0)
