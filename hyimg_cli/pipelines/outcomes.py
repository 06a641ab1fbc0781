"""What became of a job, as the line that the journal will hold."""

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch

from hyimg_cli.errors import HyimgError
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.stages import Decoded
from hyimg_cli.pipelines.video.stages import Frames
from hyimg_cli.spec.events import Failure, Outcome, OutputFile, ParallelReport, ReuseReport
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
    """What every line says, whatever the job's end: its key, how often it was tried, its seconds,
    and by kind what the session found in memory, found on disk, or had to make until now.
    """

    key: str
    attempt: int
    clock: PhaseClock
    cache: dict[str, dict[str, int]]
    peak_memory_mb: float


def done(
    job: ImageJob,
    picture: Decoded,
    spread: ParallelReport | None,
    output: OutputFile | None,
    facts: Facts,
) -> Outcome:
    """The line of a finished picture; whatever was degraded on the way is among its warnings.

    `spread`: over which ranks, None where there was one.
    """
    written = picture.text
    has_written = written.ids is not None
    return Outcome(
        status="done",
        outputs=(output,) if output else (),
        denoise_steps=picture.denoise_steps,
        cot_text=written.text if has_written else job.cot_text,
        cot_token_ids=written.ids if has_written else job.cot_token_ids,
        think_truncated=written.is_truncated,
        ratio_index=picture.bucket.ratio_index,
        kv_reuse=picture.reuse,
        batch=picture.batch,
        parallel=spread,
        warnings=_warnings(picture),
        **_common(job, facts),
    )


def video_done(
    job: VideoJob,
    frames: Frames,
    spread: ParallelReport | None,
    output: OutputFile | None,
    facts: Facts,
) -> Outcome:
    """The line of a finished video; `spread`: over which ranks, None where there was one."""
    return Outcome(
        status="done",
        outputs=(output,) if output else (),
        denoise_steps=frames.denoise_steps,
        kv_reuse=ReuseReport("none", 0, 0, 0, (), reason="t2v has no text stage"),
        batch={"denoise": 1},
        parallel=spread,
        warnings=frames.notes,
        **_common(job, facts),
    )


def failed(job: Job, error: Exception, facts: Facts, notes: tuple[str, ...]) -> Outcome:
    """The line of a failed job. An error that is not ours is a bug: its traceback is logged."""
    failure = _failure(job, error)
    return Outcome(status="failed", error=failure, warnings=notes, **_common(job, facts))


def _common(job: Job, facts: Facts) -> dict[str, Any]:
    return {
        "custom_id": job.custom_id,
        "key": facts.key,
        "attempt": facts.attempt,
        "timings_s": _rounded(facts.clock.timings_s()),
        "share_s": _rounded(facts.clock.share_s()),
        "overlapped_s": _rounded(facts.clock.overlapped_s),
        "cache": facts.cache,
        "peak_memory_mb": round(facts.peak_memory_mb, 1),
        "metadata": json.loads(job.metadata_json),
        "extra": json.loads(job.extra_json),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def _warnings(picture: Decoded) -> tuple[str, ...]:
    warnings = list(picture.notes)
    if picture.text.cut:
        warnings.append(picture.text.cut)
    if picture.reuse.status == "partial":
        warnings.append(f"KV reuse is partial: {picture.reuse.reason}")
    return tuple(warnings)


def _failure(job: Job, error: Exception) -> Failure:
    if isinstance(error, HyimgError):
        where = f"{error.where}: " if error.where else ""
        return Failure(error.code, where + error.what, error.hint, error.retryable)
    if isinstance(error, torch.OutOfMemoryError):
        hint = _SMALLER[type(job)]
        return Failure("job.out-of-memory", str(error).split("\n")[0], hint, retryable=True)
    logger.error("job %s failed by a fault of hyimg's own", job.custom_id, exc_info=error)
    what = f"{type(error).__name__}: {error}"
    return Failure("job.internal", what, "this is a bug: please report it", retryable=False)
