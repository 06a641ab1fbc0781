"""Outcomes of jobs, as the lines that the journal will hold."""

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch

from hyimg_cli.errors import HyimgError
from hyimg_cli.pipelines.request import Finished, Lost, Work
from hyimg_cli.spec.events import Failure, Outcome, OutputFile
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

logger = logging.getLogger(__name__)
# What one job alone can be given where memory was short.
_SMALLER: dict[type[Job], str] = {
    ImageJob: "--quantization fp8 or nf4 leaves more to work with, --vae-use-tiling decodes in "
    "bounded memory (other pixels near tile borders); or ask for a smaller size",
    VideoJob: "--enable-cpu-offload leaves the GPU to one network at a time; or ask for a smaller "
    "size or fewer frames",
}


@dataclass(frozen=True)
class Facts:
    """Facts of every line, whatever the job's end: its keys, how often it was tried, and by kind
    what the session found in memory, found on disk, or had to make until now.
    """

    key: str
    finishing_key: str
    attempt: int
    cache: dict[str, dict[str, int]]
    peak_memory_mb: float


def done(
    work: Finished[Job], output: OutputFile | None, facts: Facts, *warnings: str, **said: Any
) -> Outcome:
    """The line of a finished job; whatever was degraded on the way is among its warnings.

    `warnings` stand behind its own; `said` are the fields that its kind of job alone knows.
    """
    outputs = (output,) if output else ()
    return Outcome(
        status="done", outputs=outputs, **_common(work, facts, *work.warnings, *warnings), **said
    )


def failed(lost: Lost[Job], facts: Facts) -> Outcome:
    """The line of a failed job. An error that is not ours is a bug: its traceback is logged."""
    warnings = (*lost.warnings, *lost.request.warnings_if_lost)
    failure = _failure(lost.job, lost.error)
    return Outcome(status="failed", error=failure, **_common(lost, facts, *warnings))


def _common(work: Work[Job], facts: Facts, *warnings: str) -> dict[str, Any]:
    return {
        "custom_id": work.job.custom_id,
        "key": facts.key,
        "attempt": facts.attempt,
        "timings_s": _rounded(work.clock.timings_s()),
        "share_s": _rounded(work.clock.share_s()),
        "overlapped_s": _rounded(work.clock.overlapped_s),
        "cache": facts.cache,
        "peak_memory_mb": round(facts.peak_memory_mb, 1),
        "metadata": json.loads(work.job.metadata_json),
        "extra": json.loads(work.job.extra_json),
        "edit": work.request.edit,
        "finishing_key": facts.finishing_key,
        "warnings": tuple(dict.fromkeys(warnings)),
        "notes": tuple(dict.fromkeys(work.request.notes)),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def _failure(job: Job, error: Exception) -> Failure:
    if isinstance(error, torch.OutOfMemoryError):
        hint = _SMALLER[type(job)]
        return Failure("job.out-of-memory", str(error).split("\n")[0], hint, retryable=True)
    if not isinstance(error, HyimgError):
        logger.error("job %s failed by a fault of hyimg's own", job.custom_id, exc_info=error)
    return Failure.of(error)
