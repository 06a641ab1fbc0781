"""A job on its way through a pipeline, and its two ends, finished or lost."""

from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np

from hyimg_cli.errors import OutputError
from hyimg_cli.journal.job_pictures import finish, keep_redraw, write_picture
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import file_provenance
from hyimg_cli.media.images import Pixels
from hyimg_cli.media.metadata import PictureFacts
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import OutputFile, StepCacheReport
from hyimg_cli.spec.job import ImageJob, Job

OneJob = TypeVar("OneJob", bound=Job, covariant=True)


@dataclass(eq=False)
class Request(Generic[OneJob]):
    """A job that has begun: its clock, and what its line will say: `warnings` of what was degraded,
    `notes` on how its inputs were read.

    `warnings_if_lost` stand there too where it fails: what its next attempt need not do. `edit`:
    what is known of how its picture was put back on its source. `source_digests`: of the images
    that were read for it. `denoise_steps` were run for it; `step_cache`: how many were estimated.
    A pipeline's own kind of request holds what its stages have made, too.
    """

    job: OneJob
    clock: PhaseClock
    warnings: list[str] = field(default_factory=list)
    warnings_if_lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edit: dict[str, Any] | None = None
    source_digests: tuple[str, ...] = ()
    denoise_steps: int = 0
    step_cache: StepCacheReport | None = None

    def begun(self) -> dict[str, Any]:
        """The request alone, by field: what its stages have made is not held by it."""
        return {field.name: getattr(self, field.name) for field in fields(Request)}

    def as_lost(self, error: Exception) -> "Lost[OneJob]":
        """The request that failed by `error`."""
        return Lost(**self.begun(), error=error)


@dataclass(eq=False, kw_only=True)
class Lost(Request[OneJob]):
    """A request that failed."""

    error: Exception


def write_drawn(
    done: Request[ImageJob],
    folder: JobFolder,
    pixels: Pixels,
    reference: Pixels | None,
    config: RunConfig,
    **said: Any,
) -> OutputFile:
    """Write a picture that was drawn, put back on its source where the job keeps that: then it is
    compared with `reference`, what the model was shown. `said`: of the file's `PictureFacts`.
    """
    job, facts = done.job, None
    if config.output.metadata:
        made_by = file_provenance(job, config)
        facts = PictureFacts(provenance=made_by, source_sha256=done.source_digests, **said)
    if job.outside is None:
        return write_picture(folder, job, pixels, facts)
    # An edit on its source; its line tells of the redraw whatever becomes of that.
    assert reference is not None, "it is made where the source is read"
    done.edit = edit = keep_redraw(folder, job, pixels, reference, facts)
    source = done.source_digests[job.outside.kept_source - 1]
    return finish(folder, job, pixels, reference, edit, config.output, source)


def confirm_visible(pixels: Pixels) -> Pixels:
    """Return a picture [H, W, C]; raise OutputError if it shows nothing."""
    if not np.ptp(pixels, axis=(0, 1)).any():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
