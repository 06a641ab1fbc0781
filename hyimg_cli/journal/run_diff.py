"""How two runs differ: settings, versions, what each job was given, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyimg_cli.journal.bucket import existing_run
from hyimg_cli.journal.past_run import PastJob, object_in, past_jobs, read_run_info
from hyimg_cli.manifest.resolved import public_fields
from hyimg_cli.spec.job import TEXT_TASKS

Pair = tuple[Any, Any]
# Fields of a result line that say what a job was given, with their names in words.
_GIVEN = {"source_sha256": "source pictures", "model_sha256": "weights"}


@dataclass(frozen=True)
class JobDiff:
    """A job that both runs have, with different pictures, answers or ends.

    `status`: in each run; `left` without a result. `fields`: what was given to it and differs, each
    with both values; without any, the same job gave different pixels.
    `answers`: of a job that asks for a text, what was answered in each run; None for nothing.
    """

    custom_id: str
    status: tuple[str, str]
    fields: dict[str, Pair]
    answers: Pair | None = None


@dataclass(frozen=True)
class RunDiff:
    """The differences of two runs, each as the value in the first and in the second.

    `settings`: by name, as run.json records them, with their origin. `versions`: of hyimg, Python
    and packages; `machine`: system, processor and GPUs. `models`: fingerprints by name. `equal`:
    number of jobs with the same pixels or answers. `only`: jobs of one run.
    """

    settings: dict[str, Pair]
    versions: dict[str, Pair]
    machine: dict[str, Pair]
    models: dict[str, Pair]
    equal: int
    jobs: list[JobDiff]
    only: tuple[list[str], list[str]]

    @property
    def is_same(self) -> bool:
        """True if both have the same jobs with the same pixels or answers."""
        return not (self.jobs or any(self.only))


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compare two runs by their folders, here or in a store; no picture is read.

    Raises UsageError for a folder without a run, OutputFolderError for a damaged one.
    """
    for folder in (first, second):
        existing_run(folder)
    infos = read_run_info(first), read_run_info(second)
    jobs = [{job.custom_id: job for job in past_jobs(folder)} for folder in (first, second)]
    both = [name for name in jobs[0] if name in jobs[1]]
    found = list(filter(None, (_of_job(jobs[0][name], jobs[1][name]) for name in both)))
    settings = _differences(*(_values(info) for info in infos))
    settings.pop("output_dir", None)
    return RunDiff(
        settings=settings,
        versions=_differences(*(object_in(info, "versions") for info in infos)),
        machine=_differences(*(object_in(info, "hardware") for info in infos)),
        models=_differences(*(object_in(info, "models") for info in infos)),
        equal=len(both) - len(found),
        jobs=found,
        only=(
            [name for name in jobs[0] if name not in jobs[1]],
            [name for name in jobs[1] if name not in jobs[0]],
        ),
    )


def _of_job(first: PastJob, second: PastJob) -> JobDiff | None:
    """Return how a job differs in two runs; None if both gave the same, or nothing yet."""
    ends = [
        (_status(job), [one.get("pixel_sha256") or one.get("sha256") for one in job.outputs])
        for job in (first, second)
    ]
    if ends[0] == ends[1]:
        return None
    given = [_given(job) for job in (first, second)]
    is_question = any(job.line.get("task") in TEXT_TASKS for job in (first, second))
    answers = (first.result.get("answer"), second.result.get("answer")) if is_question else None
    return JobDiff(first.custom_id, (ends[0][0], ends[1][0]), _differences(*given), answers)


def _status(job: PastJob) -> str:
    return str(job.result.get("status", "left"))


def _given(job: PastJob) -> dict[str, Any]:
    """Return what a job was given: its line without paths, and digests of files."""
    line = public_fields(job.line) if "model" in job.line else {}
    line = {name: value for name, value in line.items() if name not in ("custom_id", "images")}
    return line | {word: job.result[name] for name, word in _GIVEN.items() if name in job.result}


def _values(info: Mapping[str, Any]) -> dict[str, Any]:
    flags = object_in(info, "flags")
    return {name: object_in(flags, name).get("value") for name in flags}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the values that differ, by name; None where one has no value."""
    names = dict.fromkeys((*first, *second))
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
