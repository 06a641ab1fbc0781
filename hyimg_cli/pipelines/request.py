"""A job at work in a pipeline, and its two ends, finished or lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from hyimg_cli.diffusion.denoise import Denoiser
from hyimg_cli.errors import OutputError
from hyimg_cli.journal.edit_facts import edit_notes
from hyimg_cli.journal.job_pictures import (
    LATENTS_ARE_KEPT,
    Drawing,
    finish,
    keep_redraws,
    write_layer,
    write_picture,
)
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import file_provenance
from hyimg_cli.media.images import Digests, Pixels
from hyimg_cli.media.metadata import PictureFacts
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import LayerFile, OutputFile, StepCacheReport
from hyimg_cli.spec.job import ImageJob, Job

OneJob = TypeVar("OneJob", bound=Job, covariant=True)


@dataclass(eq=False)
class Request(Generic[OneJob]):
    """A job that has begun: its clock, and the content of its line.

    `warnings`: what somebody should look at; `notes`: how its inputs were read, and how it was
    made. `notes_if_lost` are added to the line if the job fails: work that its next attempt need
    not repeat. `edit`: how its
    picture was put back on its source, as far as known. `source_digests`: of the images that were
    read for it. `checkpoint`: the place for its latents, if it has a folder. `denoise_steps`: how
    many steps were run for it, from `first_step` on; `step_cache`: how many of all its attempts'
    steps were estimated. `pixels`: of a picture that is decoded; `reference`: the picture to
    compare it with, if it is put back on its source. `parts`: the job's other drawings.

    A pipeline's own subclass also holds the results of its stages.
    """

    job: OneJob
    clock: PhaseClock
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    notes_if_lost: list[str] = field(default_factory=list)
    edit: dict[str, Any] | None = None
    source_digests: tuple[Digests, ...] = ()
    checkpoint: LatentsCheckpoint | None = None
    denoise_steps: int = 0
    first_step: int = 0
    step_cache: StepCacheReport | None = None
    pixels: Pixels | None = None
    reference: Pixels | None = None
    parts: list["Request[Any]"] = field(default_factory=list)

    def join(self, others: Sequence["Request[Any]"]) -> None:
        """Become the request of a job of which this one and the others are drawings."""
        self.parts, self.checkpoint = [*others], None
        for one in others:
            self.warnings += [text for text in one.warnings if text not in self.warnings]
            self.notes += [text for text in one.notes if text not in self.notes]
            self.notes_if_lost += [x for x in one.notes_if_lost if x not in self.notes_if_lost]
            self.denoise_steps += one.denoise_steps
            self.first_step += one.first_step
            self.clock.add(one.clock)
            if self.step_cache is not None and (cache := one.step_cache) is not None:
                full, estimated = self.step_cache.full, self.step_cache.estimated
                self.step_cache = replace(
                    cache, full=cache.full + full, estimated=cache.estimated + estimated
                )

    @property
    def drawings(self) -> list[Drawing]:
        """Return what was drawn for the job, in the order of its parts."""
        return [Drawing.of(work.pixels, work.reference) for work in (self, *self.parts)]

    @property
    def source_sha256(self) -> tuple[str, ...]:
        """Return the digests of the files of its source images."""
        return tuple(one.sha256 for one in self.source_digests)

    @property
    def sources_as_read(self) -> tuple[str, ...]:
        """Return the digests of its source images as they are read, for keys."""
        return tuple(one.picture for one in self.source_digests)

    @property
    def steps_done(self) -> int:
        """Return how many steps of the job were run, in all attempts."""
        return self.first_step + self.denoise_steps

    def begun(self) -> dict[str, Any]:
        """Return the fields of this class alone, without the results of a subclass's stages."""
        return {field.name: getattr(self, field.name) for field in fields(Request)}

    def save_latents(self, denoiser: Denoiser, latents: Tensor, **said: Any) -> None:
        """Save the job's latents after a step if they are due; `said`: further fields of `Kept`."""
        done, steps, place = denoiser.done, denoiser.steps, self.checkpoint
        if place is not None and (place.is_due(done, steps) or denoiser.is_stop(done)):
            with self.clock.apart("write"):
                place.keep(Kept(done, steps, latents, denoiser.state(), **said))

    def as_lost(self, error: Exception) -> "Lost[OneJob]":
        """Return the request as one that failed with `error`."""
        if self.checkpoint is not None and self.checkpoint.holds_last:
            self.notes_if_lost.append(LATENTS_ARE_KEPT)
        return Lost(**self.begun(), error=error)


@dataclass(eq=False, kw_only=True)
class Lost(Request[OneJob]):
    """A request that failed."""

    error: Exception


def write_drawn(
    done: Request[ImageJob],
    folder: JobFolder,
    config: RunConfig,
    **said: Any,
) -> OutputFile:
    """Write a drawn picture, put back on its source if the job keeps that.

    Each of its drawings is then compared with its reference, the source as the model saw it.
    `said`: further fields of the file's `PictureFacts`.
    """
    job, drawings, facts = done.job, done.drawings, _facts_of(done, config, said)
    if job.outside is None:
        return write_picture(folder, job, drawings[0].pixels, facts)
    # For an edit put back on its source, the line records the redraw even if the rest fails.
    done.edit = edit = keep_redraws(folder, job, drawings, facts)
    source = done.source_sha256[job.outside.kept_source - 1]
    file = finish(folder, job, drawings, edit, config.output, source)
    done.notes.extend(edit_notes(edit))
    return file


def write_layers(
    done: Request[ImageJob],
    folder: JobFolder,
    layers: Sequence[Pixels],
    config: RunConfig,
    **said: Any,
) -> list[LayerFile]:
    """Write the layers of a picture from the lowest; `said`: as for `write_drawn`."""
    facts = _facts_of(done, config, said) if layers else None
    return [
        write_layer(folder, done.job, number, pixels, facts)
        for number, pixels in enumerate(layers, 1)
    ]


def _facts_of(
    done: Request[ImageJob], config: RunConfig, said: Mapping[str, Any]
) -> PictureFacts | None:
    """Return the facts for a picture's metadata; None if it has none."""
    if not config.output.metadata:
        return None
    made_by = file_provenance(done.job, config)
    return PictureFacts(provenance=made_by, source_sha256=done.source_sha256, **said)


def confirm_visible(pixels: Pixels) -> Pixels:
    """Return a picture [H, W, C]. Raises OutputError if it shows nothing."""
    if not np.ptp(pixels, axis=(0, 1)).any():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
