"""One picture from job to pixels, a stage a call: read, encode, prefill, think, denoise, decode.

The stages before and behind the two loops; `group.py` runs thinking and denoising for several jobs
together. A stage raises JobError for what is wrong with its job alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Track
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.errors import OutputError
from hyimg_cli.media.images import SourceImage
from hyimg_cli.models.protocols import BranchLayout, Context, Encoded, MixedModel, Written
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.align import Origin, aligned
from hyimg_cli.pipelines.image.branches import BranchBuilder, Branches, report
from hyimg_cli.pipelines.image.prefixes import Prefixes
from hyimg_cli.pipelines.image.think import Writer, best
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.events import ReuseReport
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import ReuseConfig

ReadSource = Callable[[str], tuple[SourceImage, float]]
EncodeSource = Callable[[SourceImage], tuple[Encoded, float]]


@dataclass(frozen=True)
class Studio:
    """What every job of a group works with."""

    model: MixedModel
    reuse: ReuseConfig
    prefixes: Prefixes
    read: ReadSource
    encode: EncodeSource


@dataclass(eq=False)
class Prefilled:
    """A job whose AR prompt is in its context; `writer` is None where there is nothing to write."""

    job: ImageJob
    clock: PhaseClock
    sources: list[Encoded]
    origins: tuple[Origin, ...]
    context: Context
    writer: Writer | None
    prefilled: int
    shared: int
    notes: list[str]
    think_batch: int = 1


@dataclass(eq=False)
class Ready:
    """A job that waits to draw: its text is written, its K/V are the AR stage's alone."""

    opened: Prefilled
    written: Written
    bucket: Bucket
    layout: BranchLayout

    @property
    def job(self) -> ImageJob:
        return self.opened.job

    @property
    def clock(self) -> PhaseClock:
        return self.opened.clock

    @property
    def notes(self) -> list[str]:
        return self.opened.notes

    @property
    def draws_with(self) -> tuple[Bucket, int]:
        """Jobs of which this is equal can draw together."""
        return self.bucket, self.job.num_inference_steps


@dataclass(eq=False)
class Drawing:
    """A job whose branches stand."""

    job: ImageJob
    clock: PhaseClock
    written: Written
    bucket: Bucket
    branches: Branches
    reuse: ReuseReport
    origins: tuple[Origin, ...]
    notes: list[str]
    track: Track
    think_batch: int
    denoise_batch: int = 1

    def let_go(self) -> None:
        """Give the branches' K/V back: the last step is done."""
        self.branches = Branches((), self.branches.tokens)


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
    batch: dict[str, int]


def encoded_by(model: MixedModel, image: SourceImage) -> Encoded:
    """Rows of an image, fitted as it asks."""
    encode = model.encode_stretched if image.is_stretched else model.encode_source
    return encode(image.pixels, image.digest)


def opened(job: ImageJob, studio: Studio, clock: PhaseClock) -> Prefilled:
    """Read and encode the sources, once for both stages; prefill the AR stage's prompt."""
    clock.enter("read")
    images = [_read(path, studio, clock) for path in job.images]
    clock.enter("encode")
    shown = [image.stretched() if job.infer_align_image_size else image for image in images]
    sources = [_encoded(image, studio, clock) for image in shown]
    clock.enter("prefill")
    before = studio.model.rows_seen
    context, shared = _context(job, studio, sources)
    prefilled = studio.model.rows_seen - before
    is_writing = job.writes_text and context.buffer is not None
    writer = Writer(job, studio.model, context) if is_writing else None
    clock.enter("queue")
    notes = [note for image in images for note in image.notes]
    notes += [note for source in sources for note in source.notes]
    origins = tuple(Origin.of(image) for image in images)
    return Prefilled(job, clock, sources, origins, context, writer, prefilled, shared, notes)


def ready(work: Prefilled, studio: Studio) -> Ready:
    """Lay out the sequence of the diffusion stage; nothing is computed for it yet."""
    job, model = work.job, studio.model
    written = _written(work, model)
    bucket, size_note = model.bucket(job, written.ratio_id)
    layout = model.layout(job, work.sources, written.ids, bucket)
    if layout.live_stop > model.card.max_positions:
        known = f"{model.card.max_positions} positions are known to the model"
        work.notes.append(f"the picture reaches position {layout.live_stop}; {known}")
    work.notes.append(size_note)
    if work.writer is not None:
        work.notes.append(model.decode_note(work.think_batch))
    work.clock.enter("queue")
    return Ready(work, written, bucket, layout)


def drawing(waiting: Ready, studio: Studio) -> Drawing:
    """Build the branches on the prefix that the AR stage left, and let that go; draw the noise."""
    work, job, model = waiting.opened, waiting.job, studio.model
    prefixes = studio.prefixes if studio.reuse.kv_reuse else None
    builder = BranchBuilder(
        model, waiting.layout, work.sources, prefixes=prefixes, clock=work.clock
    )
    has_negative = job.guidance_scale > 1 and not model.card.is_distilled
    branches = builder.build(work.context, has_negative=has_negative)
    decoded = len(work.context.ids) - work.prefilled - work.shared
    surplus = work.writer.surplus if work.writer else 0
    reuse_report = report(
        branches,
        work.context,
        ar_tokens=(work.prefilled, work.shared, decoded, surplus),
        reuse=studio.reuse,
    )
    work.context.buffer = None
    work.clock.enter("queue")
    return Drawing(
        job=job,
        clock=work.clock,
        written=waiting.written,
        bucket=waiting.bucket,
        branches=branches,
        reuse=reuse_report,
        origins=work.origins,
        notes=work.notes,
        track=Track(
            model.initial_latents(waiting.bucket, job.seed),
            Schedule(job.num_inference_steps, job.flow_shift),
            [job.guidance_scale] * (len(branches.items) - 1),
        ),
        think_batch=work.think_batch,
    )


def finished(work: Drawing, latents_CYX: Tensor, steps: int, studio: Studio) -> Picture:
    """Decode the last latents; `steps` denoise steps led to them."""
    work.clock.enter("decode_latents")
    if not torch.isfinite(latents_CYX).all():
        raise OutputError("the latents are not finite", code="output-image.not-finite")
    pixels = _pixels(studio.model.decode_latents(latents_CYX))
    if work.job.infer_align_image_size:
        pixels = aligned(pixels, work.bucket, work.origins, studio.model.card)
    work.clock.enter("queue")
    return Picture(
        pixels=pixels,
        bucket=work.bucket,
        written=work.written,
        denoise_steps=steps,
        reuse=work.reuse,
        source_digests=tuple(origin.digest for origin in work.origins),
        notes=tuple(dict.fromkeys(note for note in work.notes if note)),
        batch={"think": work.think_batch, "denoise": work.denoise_batch},
    )


def _read(path: str, studio: Studio, clock: PhaseClock) -> SourceImage:
    image, beside_s = studio.read(path)
    clock.beside("read", beside_s)
    return image


def _encoded(image: SourceImage, studio: Studio, clock: PhaseClock) -> Encoded:
    encoded, beside_s = studio.encode(image)
    if beside_s:
        clock.beside("encode", beside_s)
    return encoded


def _context(job: ImageJob, studio: Studio, sources: list[Encoded]) -> tuple[Context, int]:
    """The AR stage's context, and how many of its tokens other jobs had computed."""
    model = studio.model
    opening = model.opening(job, sources)
    if opening is None:
        return Context([], None, None), 0
    ids = opening.layout.ids
    buffer = model.new_buffer(opening.capacity)
    # The last token is computed in any case: what follows is chosen from its hidden row.
    segments = model.segments(opening.layout, ids, sources, opening.stop - 1)
    shared = studio.prefixes.start(segments, buffer)
    hidden_M = model.prefill(opening.layout, ids, sources, buffer, opening.stop)
    studio.prefixes.keep(segments, buffer)
    return Context(list(ids[: opening.stop]), buffer, hidden_M), shared


def _written(work: Prefilled, model: MixedModel) -> Written:
    if work.writer is not None:
        return work.writer.written(model)
    if work.context.buffer is None:
        return Written()
    # No decode step: the ratio is the best of the prompt's own last logits.
    logits_V = model.text_logits([work.context])[0]
    return Written(ratio_id=best(logits_V, model.ratio_ids()))


def _pixels(levels: Tensor) -> np.ndarray:
    """Values in [0, 1] as uint8; raises OutputError for a picture that shows nothing."""
    pixels = (levels * 255).round().to(torch.uint8).numpy()
    if pixels.min() == pixels.max():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
