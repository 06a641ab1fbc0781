"""Jobs that edit results of other jobs of the same run, each after the job that it starts from.

A link is the path of the file that the earlier job will write. The key of a job does not depend on
that file but on the key of the job that makes it, so what is left to do is known before the run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from hyimg_cli.addresses import joined
from hyimg_cli.errors import SourceImageError, UsageError
from hyimg_cli.journal.journal import OUTPUTS, RunFolder
from hyimg_cli.journal.keys import result_key
from hyimg_cli.journal.resume import LOST, Resumption, is_drawn
from hyimg_cli.manifest.chains import links_of
from hyimg_cli.manifest.output_names import path_of
from hyimg_cli.manifest.planner import depths_of
from hyimg_cli.settings.paths import linked
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import Job, Link


def link_jobs(
    jobs: Sequence[Job], config: RunConfig, settle: Callable[[Job], Job] | None = None
) -> tuple[Job, ...]:
    """Return the jobs with the paths and the keys of the results that they edit.

    `settle`: changes each job once those before it are settled. Raises CheckpointError if a job's
    weights are incomplete.
    """
    settle = settle or _as_it_is
    before = {job.custom_id: names for job in jobs if (names := links_of(job))}
    if not before:
        return tuple(map(settle, jobs))
    by_id = {job.custom_id: job for job in jobs}
    made = dict[str, tuple[str, Link]]()
    wanted = {name for names in before.values() for name in names}
    for name in TopologicalSorter({name: before.get(name, ()) for name in by_id}).static_order():
        job = by_id[name]
        if name in before:
            found = [made.get(linked(path), (path, None)) for path in job.images]
            images, links = zip(*found, strict=True)
            job = replace(job, images=images, links=links)
        job = by_id[name] = settle(job)
        if name in wanted:
            path = joined(config.output.folder, f"{OUTPUTS}/{path_of(job)}")
            made[name] = str(path), Link(name, result_key(job, config))
    return tuple(by_id.values())


def _as_it_is(job: Job) -> Job:
    return job


def refuse_links(jobs: Sequence[Job], why: str) -> None:
    """Raise UsageError if a job edits the result of another one, which a command cannot do."""
    if job := next((job for job in jobs if links_of(job) or job.links), None):
        hint = "run the manifest with hyimg generate, in one folder and without shards"
        what = f'"{job.custom_id}" edits the result of another line: {why}'
        raise UsageError(what, where=job.source_line, hint=hint, code="usage.chain")


class Lost:
    """Jobs without a result, and those that come after them, each with the first such job."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._roots = {name: name for name in names}

    def add(self, name: str) -> None:
        """Note a job that has no result."""
        self._roots.setdefault(name, name)

    def error_of(self, job: Job) -> SourceImageError | None:
        """Return why a job has no result to edit, and note it; None if it may have all."""
        for link in job.made_from:
            if root := self._roots.get(link.custom_id):
                self._roots[job.custom_id] = root
                what = f'it comes after "{root}", whose result was not drawn'
                hint = f'mend "{root}" and run it again; then this job runs again by itself'
                return SourceImageError(what, hint=hint, code=LOST)
        return None


def without_lost(
    found: Resumption,
    jobs: Sequence[Job],
    every: Sequence[Job],
    faulty: Mapping[str, SourceImageError],
    folder: RunFolder,
    config: RunConfig,
) -> tuple[Resumption, dict[str, SourceImageError]]:
    """Return what is left to do, and why some of that cannot be drawn, by custom_id.

    `jobs`: the selected ones of `every`. `faulty`: jobs whose own sources cannot be read.
    """
    if not any(job.links for job in jobs):
        return found, dict(faulty)
    by_id, lost = {job.custom_id: job for job in every}, Lost([*found.failed_before, *faulty])
    elsewhere = {link.custom_id for job in jobs for link in job.made_from}
    for name in elsewhere.difference(job.custom_id for job in jobs):
        if not is_drawn(folder, by_id[name], found.results, config):
            lost.add(name)
    # A redraw waits for its source, if that is drawn again.
    drawn_again = {job.custom_id for job in found.to_run}
    waiting = [
        job
        for job in found.to_finish
        if any(link.custom_id in drawn_again for link in job.made_from)
    ]
    to_finish = [job for job in found.to_finish if job not in waiting]
    to_run, errors = [*found.to_run, *waiting], dict(faulty)
    depths = depths_of(jobs)
    for job in sorted((*to_run, *to_finish), key=lambda job: depths.get(job.custom_id, 0)):
        if job.custom_id not in errors and (error := lost.error_of(job)):
            errors[job.custom_id] = error
    # Their lines already say so.
    said = {
        name
        for name, error in errors.items()
        if error.code == LOST
        and (found.results.get(name, {}).get("error") or {}).get("message") == error.what
    }
    return replace(
        found,
        to_run=[job for job in to_run if job.custom_id not in said],
        to_finish=[job for job in to_finish if job.custom_id not in errors],
        failed_before=[*found.failed_before, *sorted(said)],
    ), {name: error for name, error in errors.items() if name not in said}
