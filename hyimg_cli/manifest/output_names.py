"""The names of all jobs' files, and jobs whose names would collide."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import PurePath

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.name_template import (
    clashes,
    fault_of,
    fill_template,
    fit,
    tells_results_apart,
    template_of,
)
from hyimg_cli.settings.paths import linked
from hyimg_cli.spec.job import BY_ID, EDIT_SUFFIXES, LAYER_MARK, ImageJob, Job


def name_files(
    manifest: Manifest, jobs: Sequence[Job], setting: Setting
) -> tuple[list[Job], list[HyimgError]]:
    """Return the jobs with their files' names, and the names' faults.

    A line with such a fault gives no job. `setting`: the name template for lines that have none.
    """
    if all(job.file_name == BY_ID for job in jobs):
        # No two jobs have the same id, in any spelling.
        beside = dict(_beside(jobs))
        return [job for job in jobs if job.source_line not in beside], list(beside.values())

    @cache
    def below(folder: str) -> str:
        """Return a source's folder relative to the manifest's; outside it, the last name."""
        place = os.path.abspath(folder)
        relative = os.path.relpath(place, os.path.abspath(manifest.folder))
        is_elsewhere = relative == ".." or relative.startswith("../")
        return fit(os.path.basename(place) if is_elsewhere else relative.removeprefix("."))

    # Jobs are numbered from 1. A faulty line counts as one job, so the jobs after it keep their
    # numbers when it is fixed. A matrix turns one line into several, which are already in order.
    results = Counter(job.source_line for job in jobs)
    lines = [(line.line_number, line.where) for line in manifest.lines]
    lines += [(number, "") for number in manifest.bad_ids]
    next_number, number = {}, 1
    for _, where in sorted(lines, key=lambda line: line[0]):
        next_number[where] = number
        number += results[where] or 1
    found = []
    for job in jobs:
        template, where = job.file_name, job.source_line
        if template != BY_ID:
            # The names of several results of a line end in their number, as their ids do.
            if results[where] > 1 and not tells_results_apart(template):
                template += f"-{job.custom_id.rpartition('-')[2]}"
            source = job.images[0] if job.images else None
            source = (linked(source) or source) if source else None
            values: dict[str, str | int] = {
                "custom_id": job.custom_id,
                "stem": job.custom_id if source is None else fit(PurePath(source).stem),
                "folder": "" if source is None else below(os.path.dirname(source)),
                "index": next_number[where],
                "seed": job.seed,
            }
            template = template_of(fill_template(template, values))
        found.append(replace(job, file_name=template))
        next_number[where] += 1
    # Faults by line: first invalid names, then names that two jobs would share.
    faults: dict[str, HyimgError] = {}
    paths = [path_of(job) for job in found]
    for job, path in zip(found, paths, strict=True):
        if what := fault_of(name_of(job)):
            faults[job.source_line] = _fault(job, setting, "bad-name", f'"{path}": {what}', "")
    for later, earlier in clashes(paths):
        job, twin = found[later], found[earlier]
        is_own = twin.source_line == job.source_line
        other = "another file of this line" if is_own else f"the file of {twin.source_line}"
        what, hint = f'"{paths[later]}" is also {other}', "add {custom_id} or {seed} to the name"
        if paths[later] != paths[earlier]:
            what = f'"{paths[later]}" may collide with {other}, "{paths[earlier]}"'
        faults[job.source_line] = _fault(job, setting, "duplicate-name", what, hint)
    faults |= _beside(found)
    return [job for job in found if job.source_line not in faults], list(faults.values())


def _beside(jobs: Sequence[Job]) -> Iterator[tuple[str, HyimgError]]:
    """Yield, by line, jobs whose file would overwrite an extra file of another job."""
    sides = {path: job for job in jobs for path in _paths_beside(job)}
    paths = [*sides, *(path_of(job) for job in jobs)] if sides else []
    for later, earlier in clashes(paths):
        if earlier < len(sides) <= later:
            job, owner = jobs[later - len(sides)], sides[paths[earlier]]
            what = f'"{paths[later]}" is reserved for files of "{owner.custom_id}"'
            ends = ".mask, .redraw, .reference, .touched or .layer-1"
            hint = f"rename it: names there cannot end in {ends}"
            where = f"{job.source_line}: custom_id"
            yield job.source_line, fault("duplicate-name", what, where, hint)


def paths_of(job: Job) -> Iterator[str]:
    """Yield the paths of the job's file, and of its extra files, below `outputs`."""
    yield path_of(job)
    yield from _paths_beside(job)


def _paths_beside(job: Job) -> Iterator[str]:
    if isinstance(job, ImageJob) and job.outside is not None:
        yield from (name_of(job) + suffix for suffix in EDIT_SUFFIXES.values())
    if isinstance(job, ImageJob) and job.layers:
        marks = map(LAYER_MARK.format, range(1, job.layers + 1))
        yield from (name_of(job) + mark + suffix_of(job) for mark in marks)


def path_of(job: Job) -> str:
    """Return the path of the job's file below `outputs`."""
    return name_of(job) + suffix_of(job)


def name_of(job: Job) -> str:
    """Return the same path without its suffix."""
    return fill_template(job.file_name, {"custom_id": job.custom_id})


def suffix_of(job: Job) -> str:
    return job.suffix if isinstance(job, ImageJob) else ".mp4"


def _fault(job: Job, setting: Setting, slug: str, what: str, hint: str) -> HyimgError:
    is_own = "name" in job.user_fields or setting.origin == "default"
    where = f"{job.source_line}: name" if is_own else f"{job.source_line}: --name"
    return fault(slug, what, where, hint)
