"""`hyimg diff`: show which settings, versions, pictures and answers of two runs differ."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.journal.run_diff import JobDiff, RunDiff, diff_runs
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.units import counted

# Jobs and values shown, so that the answer fits on a screen.
_MOST_JOBS, _MOST_VALUES, _WIDTH = 8, 8, 32
_RUN = typer.Argument(metavar="RUN", parser=o.place, help="Run folder: the -o of hyimg generate.")
_OTHER = typer.Argument(metavar="RUN", parser=o.place, help="The run to compare it with.")


def diff(first: Path = _RUN, second: Path = _OTHER, as_json: bool = o.AS_JSON) -> None:
    """Show which settings, versions, pictures and answers of two runs differ.

    Pictures are compared by the digest of their pixels; hyimg eval measures how much they differ.
    The exit code is 1 if the jobs, their pixels or their answers differ.
    """
    found = diff_runs(first, second)
    if as_json:
        render.json_line(asdict(found))
    else:
        for text in _lines(found, shown_place(first), shown_place(second)):
            render.line(text)
    raise typer.Exit(0 if found.is_same else 1)


def _lines(found: RunDiff, first: str, second: str) -> Iterator[str]:
    parts = {
        "settings": found.settings,
        "versions": found.versions,
        "machine": found.machine,
        "models": found.models,
    }
    yield f"{first} -> {second}"
    for title, values in parts.items():
        if values:
            yield f"{title}:"
            yield from _pairs(values)
        else:
            yield f"{title}: equal"
    total = found.equal + len(found.jobs)
    yield f"jobs: {found.equal:,} of {total:,} equal (status, and pixels or answer)"
    for name, count in Counter(field for job in found.jobs for field in job.fields).most_common(3):
        yield f"  {name} differs in {counted(count, 'job')}"
    if unexplained := sum(_is_unexplained(job) for job in found.jobs):
        yield f"  {counted(unexplained, 'job')} with equal lines, sources and weights differ"
    for job in found.jobs[:_MOST_JOBS]:
        yield f"  {job.custom_id}: {_described(job)}"
    if (more := len(found.jobs) - _MOST_JOBS) > 0:
        yield f"  {more:,} more; --json lists all"
    for place, names in zip((first, second), found.only, strict=True):
        if names:
            listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            yield f"only in {place}: {counted(len(names), 'job')} ({listed})"
    if any(job.status == ("done", "done") and not job.answers for job in found.jobs):
        yield f"to measure by how much: {shlex.join(['hyimg', 'eval', 'psnr', first, second])}"


def _is_unexplained(job: JobDiff) -> bool:
    return job.status == ("done", "done") and not job.fields


def _described(job: JobDiff) -> str:
    if job.status[0] != job.status[1]:
        return f"{job.status[0]} -> {job.status[1]}"
    fields = [f"{name} {_value(a)} -> {_value(b)}" for name, (a, b) in job.fields.items()]
    more = [f"{len(fields) - 2} more"] if len(fields) > 2 else []
    what = "pixels differ"
    if job.answers:
        what = "answer {} -> {}".format(*(shown(one, _WIDTH) for one in job.answers))
    return ", ".join([what, *fields[:2], *more])


def _pairs(values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, (a, b) in [*values.items()][:_MOST_VALUES]:
        yield f"  {name}: {_value(a)} -> {_value(b)}"
    if (more := len(values) - _MOST_VALUES) > 0:
        yield f"  {more:,} more; --json lists all"


def _value(value: Any) -> str:
    """Return a value in a few letters; a digest by its beginning."""
    text = value if isinstance(value, str) else "not set" if value is None else shown(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
