"""One picture from job to pixels, a stage a call.

    prefill ─▶ Prefilled ─ text decoded ─▶ with_text ─▶ Generated ─▶ with_branches ─▶ Denoising
            ─ all denoise steps ─▶ decode ─▶ Decoded

Each form holds the one before it and what its own stage adds. `batch.py` runs decode steps and
denoise steps for several jobs together. A stage raises JobError for what is wrong with its job
alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Track
from hyimg_cli.errors import OutputError
from hyimg_cli.media.images import SourceImage
from hyimg_cli.models.protocols import Canvas, Context, Encoded, GeneratedText, MixedModel
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.align import Origin, aligned
from hyimg_cli.pipelines.image.branches import BranchBuilder, Branches, report
from hyimg_cli.pipelines.image.prefixes import Prefixes
from hyimg_cli.pipelines.image.think import Decoding
from hyimg_cli.pipelines.request import Finished, Request, Work
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.events import ReuseReport
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import ReuseConfig

ReadSource = Callable[[str], tuple[SourceImage, float]]
EncodeSource = Callable[[SourceImage], tuple[Encoded, float]]


@dataclass(frozen=True)
class ImageStages:
    """What every job of a group works with."""

    model: MixedModel
    reuse: ReuseConfig
    prefixes: Prefixes
    read: ReadSource
    encode: EncodeSource


@dataclass(eq=False)
class Prefilled(Work[ImageJob]):
    """Its AR prompt is in its context; `decoding` is None where there is no text to write.

    `computed`, `shared`: rows of the prompt that were computed, and that other jobs had left.
    `batch`: how many jobs were at work together at most, by stage.
    """

    sources: list[Encoded]
    origins: tuple[Origin, ...]
    context: Context
    decoding: Decoding | None
    computed: int
    shared: int
    batch: dict[str, int] = field(default_factory=lambda: {"think": 1, "denoise": 1})

    def release(self) -> None:
        """Give the context's K/V and the sources' rows back: the branches stand."""
        self.context.buffer = None
        self.sources = []


@dataclass(eq=False)
class Generated(Work[ImageJob]):
    """It waits to be drawn: its text is there, its K/V are the AR stage's alone."""

    prefilled: Prefilled
    text: GeneratedText
    canvas: Canvas

    @property
    def draws_with(self) -> tuple[Bucket, int]:
        """Jobs of which this is equal can be denoised together."""
        return self.canvas.bucket, self.job.num_inference_steps


@dataclass(eq=False)
class Denoising(Work[ImageJob]):
    """Its branches stand; `latents_CYX` are those behind its latest step, number `steps`."""

    generated: Generated
    branches: Branches
    reuse: ReuseReport
    track: Track
    latents_CYX: Tensor
    steps: int = 0

    @property
    def batch(self) -> dict[str, int]:
        return self.generated.prefilled.batch

    def release(self) -> None:
        """Give the branches' K/V back: the last step is done."""
        self.branches = Branches((), self.branches.tokens)


@dataclass(eq=False)
class Decoded(Finished[ImageJob]):
    """A picture, uint8 [H, W, 3]."""

    denoising: Denoising
    pixels: np.ndarray

    @property
    def denoise_steps(self) -> int:
        return self.denoising.steps

    @property
    def text(self) -> GeneratedText:
        return self.denoising.generated.text

    @property
    def bucket(self) -> Bucket:
        return self.denoising.generated.canvas.bucket

    @property
    def reuse(self) -> ReuseReport:
        return self.denoising.reuse

    @property
    def batch(self) -> dict[str, int]:
        return self.denoising.batch

    @property
    def source_digests(self) -> tuple[str, ...]:
        return tuple(origin.digest for origin in self.denoising.generated.prefilled.origins)


def encoded_by(model: MixedModel, image: SourceImage) -> Encoded:
    """Rows of an image, fitted as it asks."""
    encode = model.encode_stretched if image.is_stretched else model.encode_source
    return encode(image.pixels, image.digest)


def prefill(request: Request[ImageJob], stages: ImageStages) -> Prefilled:
    """Read and encode the sources, once for both stages; prefill the AR stage's prompt."""
    job, clock = request.job, request.clock
    clock.enter("read")
    images = [_read(path, stages, clock) for path in job.images]
    clock.enter("encode")
    shown = [image.stretched() if job.infer_align_image_size else image for image in images]
    sources = [_encoded(image, stages, clock) for image in shown]
    clock.enter("prefill")
    before = stages.model.rows_seen
    context, shared = _context(job, stages, sources)
    computed = stages.model.rows_seen - before
    is_writing = job.writes_text and context.buffer is not None
    decoding = Decoding(job, stages.model, context) if is_writing else None
    clock.enter("queue")
    request.notes += [note for image in images for note in image.notes]
    request.notes += [note for source in sources for note in source.notes]
    origins = tuple(Origin.of(image) for image in images)
    return Prefilled(request, sources, origins, context, decoding, computed, shared)


def with_text(work: Prefilled, stages: ImageStages) -> Generated:
    """Lay out the sequence of the diffusion stage; nothing is computed for it yet."""
    model, text = stages.model, GeneratedText()
    if work.decoding is not None:
        text = work.decoding.generated(model)
    elif work.context.buffer is not None:
        # No decode step: what is left to decide follows from the prompt's own last logits.
        text = GeneratedText(ending=model.ending(work.context))
    canvas = model.canvas(work.job, work.sources, text)
    work.notes.extend(canvas.notes)
    if work.decoding is not None:
        work.notes.extend(filter(None, [model.decode_note(work.batch["think"])]))
    work.clock.enter("queue")
    return Generated(work.request, work, text, canvas)


def with_branches(waiting: Generated, stages: ImageStages) -> Denoising:
    """Build the branches on the prefix that the AR stage left, and release that; draw the noise."""
    work, model = waiting.prefilled, stages.model
    prefixes = stages.prefixes if stages.reuse.kv_reuse else None
    builder = BranchBuilder(
        model, waiting.canvas, work.sources, prefixes=prefixes, clock=work.clock
    )
    branches = builder.build(work.context)
    decoded = len(work.context.ids) - work.computed - work.shared
    overdecoded = work.decoding.overdecoded if work.decoding else 0
    reuse = report(
        branches,
        work.context,
        ar_tokens=(work.computed, work.shared, decoded, overdecoded),
        reuse=stages.reuse,
    )
    work.release()
    work.clock.enter("queue")
    track = model.track(waiting.job, waiting.canvas, len(branches.items))
    return Denoising(work.request, waiting, branches, reuse, track, track.noise_CYX)


def decode(work: Denoising, stages: ImageStages) -> Decoded:
    """Decode the last latents."""
    work.clock.enter("decode_latents")
    if not torch.isfinite(work.latents_CYX).all():
        raise OutputError("the latents are not finite", code="output-image.not-finite")
    pixels = _pixels(stages.model.decode_latents(work.latents_CYX))
    if work.job.infer_align_image_size:
        generated = work.generated
        origins, bucket = generated.prefilled.origins, generated.canvas.bucket
        pixels = aligned(pixels, bucket, origins, stages.model.card)
    work.clock.enter("queue")
    return Decoded(work.request, work, pixels)


def _read(path: str, stages: ImageStages, clock: PhaseClock) -> SourceImage:
    image, overlapped_s = stages.read(path)
    clock.overlapped("read", overlapped_s)
    return image


def _encoded(image: SourceImage, stages: ImageStages, clock: PhaseClock) -> Encoded:
    encoded, overlapped_s = stages.encode(image)
    if overlapped_s:
        clock.overlapped("encode", overlapped_s)
    return encoded


def _context(job: ImageJob, stages: ImageStages, sources: list[Encoded]) -> tuple[Context, int]:
    """The AR stage's context, and how many of its tokens other jobs had computed."""
    model = stages.model
    opening = model.opening(job, sources)
    if opening is None:
        return Context([], None, None), 0
    ids = opening.layout.ids
    buffer = model.new_buffer(opening.capacity)
    # The last token is computed in any case: what follows is chosen from its hidden row.
    segments = model.segments(opening.layout, ids, sources, opening.stop - 1)
    shared = stages.prefixes.start(segments, buffer)
    hidden_M = model.prefill(opening.layout, ids, sources, buffer, opening.stop)
    stages.prefixes.keep(segments, buffer)
    return Context(list(ids[: opening.stop]), buffer, hidden_M), shared


def _pixels(levels: Tensor) -> np.ndarray:
    """Values in [0, 1] as uint8; raises OutputError for a picture that shows nothing."""
    pixels = (levels * 255).round().to(torch.uint8).numpy()
    if pixels.min() == pixels.max():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
