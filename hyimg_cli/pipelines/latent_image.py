"""Pictures by editors that denoise latents alone: encode, denoise, decode, a job at a time.

Every distinct condition of a plan's jobs is encoded before the transformer comes, and is found by
later runs on disk. Latents are kept on the way and behind the last step, until the file stands.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES
from hyimg_cli.errors import JobError, OutputError
from hyimg_cli.journal.job_pictures import edit_warnings
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import confirm_dtype, file_provenance, key_of, source_digest
from hyimg_cli.kernels.devices import peak_memory_mb, synchronize
from hyimg_cli.media.images import Pixels, read_image, stretch
from hyimg_cli.media.metadata import PictureFacts
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import PromptEmbedding
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.request import Facts, Lost, Request, done_outcome, write_drawn
from hyimg_cli.pipelines.video.encodings import Encodings
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import (
    Event,
    JobStarted,
    Outcome,
    OutputFile,
    Prewarmed,
    Progress,
    ReuseReport,
)
from hyimg_cli.spec.job import ImageJob

TEXTS = "text_encoder"


@dataclass(eq=False)
class EditRequest(Request[ImageJob]):
    """A picture on its way. `latents`: those behind its last step; `reference`: what the picture
    will be compared with, where it is put back on its source.
    """

    checkpoint: LatentsCheckpoint | None = None
    conditions: tuple[tuple[Any, PromptEmbedding], ...] = ()
    latents: Tensor | None = None
    reference: Pixels | None = None
    pixels: Pixels | None = None


Events = Iterator[Progress | EditRequest | Lost[ImageJob]]


class LatentImagePipeline(Pipeline[Any, ImageJob, EditRequest]):
    """Draws and edits pictures, one at a time, by a `LatentImageModel`."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        is_on = config.reuse.prompt_cache
        self._encodings = {
            True: Encodings[Any](config.cache, PROMPT_EMBEDDINGS, is_on=is_on),
            False: Encodings[Any](config.cache, SOURCE_IMAGES),
        }
        self._digest_of = cache(source_digest)

    def use(
        self, model: str, jobs: Sequence[ImageJob], folder: JobFolder | None
    ) -> Iterator[Event]:
        if self.model == model:
            return
        self.release()
        with memory_guard(model, jobs[:1], self._config):
            started = time.perf_counter()
            choice = replace(self._config.model, model=model)
            self._model = opened = registry.load_editor(choice)
            confirm_dtype(choice, opened.dtype_name)
            opened_s = time.perf_counter() - started
            conditions: list[Any] = []
            for job in jobs:
                with suppress(JobError, OSError):  # one that will fail encodes nothing
                    conditions += opened.conditions_of(job, self._digests(job))
            for is_text, encodings in self._encodings.items():
                own = [one for one in conditions if (one.stage == TEXTS) == is_text]
                yield from encodings.ready(opened.conditions, own)
            started = time.perf_counter()
            opened.load_weights()
            yield self._loaded(opened_s + time.perf_counter() - started, 1)

    def work(
        self, jobs: Sequence[ImageJob], folder: JobFolder | None, started: float
    ) -> Iterator[JobStarted | Progress | EditRequest | Lost[ImageJob]]:
        model, shares = self._resident(), Shares()
        waits = partial(synchronize, [model.device])
        memory = MemoryPolicy(model.conditions.release, "the encoders")
        for job in jobs:
            digests = self._digests(job)
            request = EditRequest(job, PhaseClock(started, waits, shares), source_digests=digests)
            if folder is not None:
                key, path = key_of(job, digests, self._config), folder.latents_for(job.custom_id)
                every = self._config.output.checkpoint_every
                request.checkpoint = LatentsCheckpoint(path, key, every, request.warnings)
            yield JobStarted(job.custom_id)
            yield from memory.attempt([request], self._make, lambda one, why: [one.as_lost(why)])

    def _make(self, request: EditRequest) -> Events:
        """One picture: its conditions, every denoise step behind the kept ones, its pixels."""
        job, model, clock = request.job, self._resident(), request.clock
        clock.enter("read")
        if job.outside is not None:
            bucket = model.card.bucket_of(job.size)
            assert bucket is not None, "an edit that keeps its source is drawn in its size"
            source = read_image(Path(job.kept_image))
            request.reference = stretch(source.pixels, bucket.size)
        kept = None if request.checkpoint is None else request.checkpoint.found()
        if kept is not None and kept.is_last:
            request.warnings += kept.warnings
            request.notes += kept.notes
            latents = kept.latents_BCFYX.to(model.device)
        else:
            yield from self._encode(request)
            latents = yield from self._denoise(request, kept)
        yield Progress(job.custom_id, "decode_latents")
        clock.enter("decode_latents")
        request.pixels = checked(model.decode_latents(job, latents))
        request.conditions = ()
        clock.enter("queue")
        yield request

    def _encode(self, request: EditRequest) -> Iterator[Progress]:
        model = self._resident()
        yield Progress(request.job.custom_id, "encode")
        request.clock.enter("encode")
        found = []
        for one in model.conditions_of(request.job, request.source_digests):
            made = self._encodings[one.stage == TEXTS].of(model.conditions, one)
            found.append((one, made))
            request.warnings += made.warnings
            request.notes += made.notes
        request.conditions = tuple(found)

    def _denoise(
        self, request: EditRequest, kept: Kept | None
    ) -> Generator[Progress, None, Tensor]:
        job, place = request.job, request.checkpoint
        denoiser = self._resident().denoiser(job, request.conditions)
        latents: Tensor = denoiser.initial_latents()
        steps, first = denoiser.steps, 0
        if kept is not None:
            denoiser.restore(kept.step, kept.state)
            first, latents = kept.step, kept.latents_BCFYX.to(latents.device)
        request.clock.enter("denoise_first")
        yield Progress(job.custom_id, "denoise", first, steps)
        for step in range(first + 1, steps + 1):
            latents = denoiser.step(step - 1, latents)
            if step == first + 1:
                request.clock.enter("denoise_rest")
            if place is not None and place.is_due(step, steps):
                said = tuple(request.warnings), tuple(request.notes)
                place.keep(Kept(step, steps, latents, denoiser.state(), *said))
            yield Progress(job.custom_id, "denoise", step, steps)
        request.denoise_steps = steps - first
        return latents

    def write(self, done: EditRequest, folder: JobFolder) -> OutputFile | None:
        assert done.pixels is not None, "it is decoded"
        facts = None
        if self._config.output.metadata:
            facts = PictureFacts(
                model_name=self._resident().card.name,
                provenance=file_provenance(done.job, self._config),
                source_sha256=done.source_digests,
            )
        return write_drawn(done, folder, done.pixels, done.reference, facts, self._config.output)

    def outcome(self, done: EditRequest, output: OutputFile | None, facts: Facts) -> Outcome:
        reason = f"{self._resident().card.name} has no text stage"
        return done_outcome(
            done,
            output,
            facts,
            *edit_warnings(done.edit),
            kv_reuse=ReuseReport("none", 0, 0, 0, (), reason=reason),
            batch={"denoise": 1},
        )

    def forget(self) -> None:
        for encodings in self._encodings.values():
            encodings.clear()
        self._digest_of.cache_clear()

    def cache_counts(self) -> dict[str, dict[str, int]]:
        return {
            "prompt_embeddings": self._encodings[True].counts(),
            "source_images": self._encodings[False].counts(),
            "encoder_runs": dict(self._resident().conditions.encoder_runs),
        }

    def peak_memory_mb(self) -> float:
        return peak_memory_mb([self._resident().device])

    def _prewarm(self, jobs: Sequence[ImageJob], folder: JobFolder | None) -> Prewarmed:
        return Prewarmed(0, 0.0)

    def _digests(self, job: ImageJob) -> tuple[str, ...]:
        return tuple(map(self._digest_of, job.images))


def checked(pixels: Pixels) -> Pixels:
    """`pixels`; raises OutputError where they show nothing."""
    if np.ptp(pixels) == 0:
        raise OutputError("every pixel of the picture is the same", code="output-image.constant")
    return pixels
