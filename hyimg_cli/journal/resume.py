"""Decide which jobs a run must still do, given the results in its folder."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal.journal import OUTPUTS, RunFolder, files_of_edit, files_of_result, outputs_of
from hyimg_cli.journal.kept_latents import find_begun
from hyimg_cli.journal.keys import NOT_FOUND, count_differences, finishing_key, job_keys
from hyimg_cli.journal.past_run import readable_jobs
from hyimg_cli.manifest.output_names import name_of, paths_of
from hyimg_cli.settings.name_template import clashes
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import DRAWN_FILES, ImageJob, Job
from hyimg_cli.spec.options import boxes_text
from hyimg_cli.spec.plan import Begun
from hyimg_cli.spec.units import counted

Results = Mapping[str, Mapping[str, Any]]
# The code of a job that failed because it edits a result that was not drawn.
LOST = "source.link"


@dataclass(frozen=True)
class ResumePolicy:
    """How a run treats results of an earlier run in the same folder."""

    resume: bool = True
    retry_failed: bool = False
    force: bool = False


@dataclass(frozen=True)
class Resumption:
    """Jobs to run, jobs already done, and failed jobs that are not run again.

    `to_finish`: jobs whose redraw exists and only has to be put back on its source again.
    `former`: files of results that will be replaced, by job, without files that another result
    also names. `results`: the last outcomes so far. `begun`: the jobs to run that resume from kept
    latents.
    """

    to_run: list[Job]
    done: list[str]
    failed_before: list[str]
    to_finish: list[ImageJob]
    former: dict[str, list[str]]
    results: Results
    begun: dict[str, Begun]


def resume(
    folder: RunFolder, jobs: Sequence[Job], config: RunConfig, policy: ResumePolicy
) -> Resumption:
    """Sort `jobs` by the results in `folder`; weights are read only if there are results.

    A job is done if its key is the same and every file exists with its sha256, including a video's
    PNG files if the run writes them. A job that failed under another key is a new job and runs. So
    does one that failed only because a result that it edits was missing. If only the finishing key
    differs, or its file is gone, an existing redraw is enough.

    Raises OutputFolderError if a picture would be replaced by one of another key or name, or,
    without resume, if the folder holds results at all; `force` allows both. In any case, raises it
    if a file of another job would be replaced.
    """
    results = folder.results()
    if not policy.resume and results and not policy.force:
        raise OutputFolderError(
            f"the folder already has {counted(len(results), 'result')}",
            where=folder.place,
            hint="choose another folder, remove --no-resume, or run everything again with --force",
            code="output.not-empty",
        )
    known = [job for job in jobs if policy.resume and job.custom_id in results]
    keys, with_frames = job_keys(known, config), config.output.frames != "none"
    done, failed_before = list[str](), list[str]()
    to_finish, others = list[ImageJob](), list[Job]()
    for job in known:
        entry, wanted = results[job.custom_id], finishing_key(job, config.output)
        edit = files_of_edit(entry)
        matte = edit.get("mask", {})
        redraw = [edit.get(kind, {}) for kinds in DRAWN_FILES[: len(job.parts)] for kind in kinds]
        is_finished = wanted == entry.get("finishing_key", "") or not entry.get("edit")
        is_done = entry.get("status") == "done" and is_finished
        if entry.get("key") != keys[job.custom_id] or _is_renamed(job, entry):
            others += [job] if entry.get("status") == "done" else []
        elif (
            is_done
            and is_intact(folder, entry, with_frames=with_frames)
            and (not wanted or folder.holds([matte]) or not folder.holds(redraw))
        ):
            done.append(job.custom_id)
        elif (
            entry.get("status") == "failed"
            and is_finished
            and not policy.retry_failed
            and (entry.get("error") or {}).get("code") != LOST
        ):
            failed_before.append(job.custom_id)
        elif isinstance(job, ImageJob) and wanted and folder.holds(redraw):
            to_finish.append(job)
    settled = {*done, *failed_before, *(job.custom_id for job in to_finish)}
    to_run = [job for job in jobs if job.custom_id not in settled]
    if others and not policy.force:
        by_key = (job for job in others if keys[job.custom_id] != results[job.custom_id].get("key"))
        counts = count_differences(folder.place, by_key, config)
        counts.update("name" for job in others if _is_renamed(job, results[job.custom_id]))
        named = ", ".join(f"{name}: {count}" for name, count in counts.most_common())
        hint = (
            f"--force overwrites {len(others)} and keeps {len(done)}; or choose another "
            "folder with -o; run.json has the old flags"
        )
        if crops := _crops_hint(folder, others, counts):
            hint = f"{crops}; or {hint}"
        if NOT_FOUND in counts:
            hint = "restore the source images, or choose another folder with -o"
        differ = f"{counted(len(jobs), 'job')} {'differs' if len(others) == 1 else 'differ'}"
        raise OutputFolderError(
            f"{len(others):,} of {differ} ({named}) from the results in this folder, "
            f'"{others[0].custom_id}" first',
            where=folder.place,
            hint=hint,
            code="output.other-job",
        )
    _refuse_taken_names(folder.folder, jobs, to_run, results)
    # Files to remove once a job's new line is on disk; no other result names them.
    owners = Counter(file for entry in results.values() for file in files_of_result(entry))
    former = {
        job.custom_id: [one for one in files_of_result(results[job.custom_id]) if owners[one] == 1]
        for job in to_run
        if job.custom_id in results
    }
    begun = find_begun(folder, to_run if policy.resume else (), config)
    return Resumption(to_run, done, failed_before, to_finish, former, results, begun)


def is_drawn(folder: RunFolder, job: Job, results: Results, config: RunConfig) -> bool:
    """Return True if a job's result can be edited: it is this job's, and its file is intact."""
    entry, (key,) = results.get(job.custom_id, {}), job_keys([job], config).values()
    is_own = entry.get("status") == "done" and entry.get("key") == key
    return is_own and is_intact(folder, entry)


def is_intact(folder: RunFolder, entry: Mapping[str, Any], *, with_frames: bool = False) -> bool:
    """Return True if a result has outputs and all their files exist as they were written."""
    outputs = entry.get("outputs") or ()
    return bool(outputs) and folder.holds(outputs, with_frames=with_frames)


def _crops_hint(folder: RunFolder, others: Sequence[Job], counts: Mapping[str, int]) -> str:
    """Return how to keep the first drawing whose crop is another one now; empty for none."""
    if "crop" not in counts:
        return ""
    lines = readable_jobs(folder.place)
    for job in others:
        old = lines.get(job.custom_id, {})
        if isinstance(job, ImageJob) and old:
            crop = boxes_text(job.crops)
            if "crop" in old and old["crop"] != crop:
                return f"crop {old['crop']} keeps the drawing, if it contains the region"
            if crop and "crop" not in old:
                return "--region-size fit keeps the drawings of the whole source"
    return ""


def _is_renamed(job: Job, entry: Mapping[str, Any]) -> bool:
    """Return True if a done job's file would now have another name, apart from its format."""
    paths = (PurePosixPath(output["path"]) for output in outputs_of(entry)[:1])
    name = f"{OUTPUTS}/{name_of(job)}"
    return any(str(path).removesuffix(path.suffix) != name for path in paths)


def _refuse_taken_names(
    folder: Path, jobs: Sequence[Job], to_run: Sequence[Job], results: Results
) -> None:
    """Raise OutputFolderError if a file of `to_run` would replace another result or a source.

    Another result means one whose id is not among `jobs`.
    """
    taken: dict[str, tuple[str, str]] = {}
    outputs, real = os.path.realpath(folder / OUTPUTS), cache(os.path.realpath)
    for image in dict.fromkeys(image for job in jobs for image in job.files):
        path = f"{real(os.path.dirname(image))}/{os.path.basename(image)}"
        if path.startswith(f"{outputs}/") and os.path.exists(path):
            taken[OUTPUTS + path.removeprefix(outputs)] = "output.source", "a source image"
    own = {job.custom_id for job in jobs}
    for name, entry in results.items():
        for output in outputs_of(entry) if name not in own else ():
            taken[output["path"]] = "output.other-file", f'that of "{name}"'
    each = ((job, path) for job in to_run if taken for path in paths_of(job))
    targets = [(job, f"{OUTPUTS}/{path}") for job, path in each]
    for later, earlier in clashes([*taken, *(path for _, path in targets)]):
        if earlier < len(taken) <= later:
            path, (job, _) = list(taken)[earlier], targets[later - len(taken)]
            code, whose = taken[path]
            raise OutputFolderError(
                f'{path} would be the file of "{job.custom_id}", but is {whose}',
                where=job.source_line,
                hint="choose another folder with -o, or another --name",
                code=code,
            )
