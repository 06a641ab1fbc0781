"""One picture from job to pixels, a stage a call: read, encode, prefill, think, denoise, decode."""

# Legend: C channel, Y X latent rows and columns
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import denoise
from hyimg_cli.diffusion.schedule import Schedule, Step
from hyimg_cli.engine.branches import Branches, build_branches, report
from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.think import think
from hyimg_cli.errors import OutputError
from hyimg_cli.media.images import SourceImage, read_image
from hyimg_cli.models.protocols import Encoded, MixedModel, Written
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.events import DenoiseStep, PhaseStarted, ReuseReport, ThinkToken
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import ReuseConfig

Progress = PhaseStarted | ThinkToken | DenoiseStep
EncodeSource = Callable[[SourceImage], Encoded]


@dataclass(frozen=True)
class Picture:
    """A finished picture, uint8 [H, W, 3], and how it came about."""

    pixels: np.ndarray
    bucket: Bucket
    written: Written
    denoise_steps: int
    reuse: ReuseReport
    source_digests: tuple[str, ...]
    notes: tuple[str, ...]


def draw(
    job: ImageJob,
    model: MixedModel,
    reuse: ReuseConfig,
    *,
    encode: EncodeSource,
    clock: PhaseClock,
) -> Generator[Progress, None, Picture]:
    """Tell one job's story; the picture is the generator's return value.

    Raises JobError for what is wrong with this job alone.
    """
    # 1. Source images, read and encoded once for both stages.
    clock.enter("read")
    images = [read_image(Path(path)) for path in job.images]
    clock.enter("encode")
    sources = [encode(image) for image in images]

    # 2. The AR stage's prompt, then its text.
    yield PhaseStarted(job.custom_id, "prefill")
    clock.enter("prefill")
    before = model.rows_seen
    context = model.open_context(job, sources)
    prefill_rows = model.rows_seen - before
    yield PhaseStarted(job.custom_id, "think")
    clock.enter("think")
    written = yield from think(job, model, context)
    decode_rows = model.rows_seen - before - prefill_rows

    # 3. The branches, on the prefix that the AR stage left.
    bucket, size_note = model.bucket(job, written.ratio_id)
    layout = model.layout(job, sources, written.ids, bucket)
    branches = build_branches(
        model,
        layout,
        sources,
        context,
        has_negative=job.guidance_scale > 1 and not model.card.is_distilled,
        reuse=reuse,
        clock=clock,
    )
    reuse_report = report(
        branches, context, prefill_rows=prefill_rows, decode_rows=decode_rows, reuse=reuse
    )

    # 4. Denoise steps, 5. pixels.
    yield PhaseStarted(job.custom_id, "denoise", job.num_inference_steps)
    latents_CYX, steps = yield from _denoised(job, model, branches, bucket, clock)
    clock.enter("decode_latents")
    pixels = _pixels(model.decode_latents(latents_CYX))
    notes = [note for image in images for note in image.notes]
    notes += [note for source in sources for note in source.notes]
    return Picture(
        pixels=pixels,
        bucket=bucket,
        written=written,
        denoise_steps=steps,
        reuse=reuse_report,
        source_digests=tuple(image.digest for image in images),
        notes=tuple(dict.fromkeys(note for note in (*notes, size_note) if note)),
    )


def _denoised(
    job: ImageJob, model: MixedModel, branches: Branches, bucket: Bucket, clock: PhaseClock
) -> Generator[DenoiseStep, None, tuple[Tensor, int]]:
    """The last latents, and how many steps were done."""

    def velocity(latents_CYX: Tensor, step: Step) -> Tensor:
        return model.velocity(latents_CYX, step, job.guidance_scale, branches.items)

    clock.enter("denoise_first")
    latents_CYX = model.initial_latents(bucket, job.seed)
    schedule = Schedule(job.num_inference_steps, job.flow_shift)
    scales = [job.guidance_scale] * (len(branches.items) - 1)
    steps = 0
    for moved_CYX in denoise(latents_CYX, schedule, velocity, scales):
        latents_CYX, steps = moved_CYX, steps + 1
        if steps == 1:
            clock.enter("denoise_rest")
        yield DenoiseStep(job.custom_id, steps, job.num_inference_steps)
    if not torch.isfinite(latents_CYX).all():
        raise OutputError("the latents are not finite", code="output-image.not-finite")
    return latents_CYX, steps


def _pixels(levels: Tensor) -> np.ndarray:
    """Values in [0, 1] as uint8; raises OutputError for a picture that shows nothing."""
    pixels = (levels * 255).round().to(torch.uint8).numpy()
    if pixels.min() == pixels.max():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
