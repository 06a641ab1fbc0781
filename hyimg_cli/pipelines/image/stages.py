"""One picture from job to pixels, a stage a call.

    prefill ─▶ Prefilled ─ text decoded ─▶ with_text ─▶ Generated ─▶ with_branches ─▶ Denoising
            ─ all denoise steps ─▶ decode ─▶ Decoded

Each form holds the one before it and what its own stage adds. `batch.py` runs decode steps and
denoise steps for several jobs together. A stage raises JobError for what is wrong with its job
alone.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Track
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import OutputError
from hyimg_cli.kv.segments import Segment, TextSegment
from hyimg_cli.manifest.planner import TextIdentity, text_identity
from hyimg_cli.manifest.written import Replay
from hyimg_cli.media.images import Pixels, SourceImage, stretch
from hyimg_cli.models.protocols import Canvas, Context, Encoded, GeneratedText, MixedModel
from hyimg_cli.pipelines.image.branches import BranchBuilder, Prefixes, reuse_of
from hyimg_cli.pipelines.image.think import CachedText, DecodeRequest, Texts
from hyimg_cli.pipelines.request import Finished, Request
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.events import ReuseReport
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.step_cache import StepCache

logger = logging.getLogger(__name__)
ReadSource = Callable[[str], tuple[SourceImage, float]]
EncodeSource = Callable[[SourceImage], tuple[Encoded, float]]
RoundTrip = Callable[[SourceImage, Size], tuple[np.ndarray, str]]
# Of height / width, in `infer_align_image_size`. Source: HunyuanImage-3.0-Instruct.
_SAME_RATIO = 0.01


@dataclass(frozen=True)
class ImageStages:
    """Parts that all jobs of a group share. Without `texts` each job writes its own; where nothing
    `draws` a job ends with its text. `round_trip`: a source as the model's own codec gives it back.
    """

    model: MixedModel
    reuse: ReuseConfig
    prefixes: Prefixes
    read: ReadSource
    encode: EncodeSource
    texts: Texts | None = None
    draws: bool = True
    round_trip: RoundTrip | None = None


@dataclass(eq=False, kw_only=True)
class Prefilled(Request[ImageJob]):
    """Its AR prompt is in its context; `decoding` is None where there is no text to write.

    `computed`, `shared`: rows of the prompt that were computed, and that other jobs had left.
    `prompt`: all but its last token, as others may share it. `cached`: the text where it had been
    written before: its rows are in the context, and count like the prompt's. `reference`: what the
    picture will be compared with, where it is put back on its source. `batch`: how many jobs
    were at work together at most, by stage.
    """

    sources: list[Encoded]
    source_sizes: tuple[Size, ...]
    context: Context
    decoding: DecodeRequest | None
    computed: int
    shared: int
    prompt: list[Segment]
    cached: CachedText | None
    reference: np.ndarray | None
    batch: dict[str, int] = field(default_factory=lambda: {"think": 1, "denoise": 1})

    @property
    def prompt_stop(self) -> int:
        """Tokens of the AR prompt."""
        return sum(segment.length for segment in self.prompt) + 1

    @property
    def cot_from(self) -> str | None:
        """The job whose text this is; None where it is its own."""
        if self.cached is None or self.cached.writer == self.job.custom_id:
            return None
        return self.cached.writer

    def as_cached(self, text: GeneratedText) -> CachedText:
        """The job's text, when it has ended, as other jobs may have it."""
        if self.cached is not None:
            return self.cached
        fed = tuple(self.context.ids[self.prompt_stop :])
        runs = tuple(self.decoding.runs) if self.decoding else ()
        return CachedText(text, fed, runs, self.job.custom_id)

    def release_context(self) -> None:
        """Give the context's K/V and the sources' rows back: the branches stand."""
        self.context.buffer = None
        self.sources = []


@dataclass(eq=False, kw_only=True)
class Generated(Prefilled, Finished[ImageJob]):
    """It waits to be drawn, or ends here: its text is there, its K/V are the AR stage's alone."""

    text: GeneratedText
    canvas: Canvas
    reuse: ReuseReport
    denoise_steps: int = 0

    @property
    def bucket(self) -> Bucket:
        return self.canvas.bucket

    @property
    def written(self) -> dict[str, Any]:
        """The text and how its tokens entered the network, for `Replay`."""
        cached = self.as_cached(self.text)
        return {
            "cut": self.text.cut,
            "ending": list(self.text.ending),
            "lengths": [len(run) for run in cached.runs],
            "withdrawn": list(cached.withdrawn),
        }

    @property
    def draws_with(self) -> tuple[Bucket, int, StepCache | None]:
        """Jobs of which this is equal are denoised together: as many steps, and the same ones in
        full.
        """
        return self.canvas.bucket, self.job.num_inference_steps, self.job.step_cache


@dataclass(eq=False, kw_only=True)
class Denoising(Generated):
    """Its branches stand; `latents_CYX` are those behind its latest step, number `denoise_steps`.

    `velocities`: the step cache's, of the latest attempt.
    """

    branches: tuple[Any, ...]
    track: Track
    latents_CYX: Tensor
    velocities: VelocityCache


@dataclass(eq=False, kw_only=True)
class Decoded(Denoising):
    """A picture, uint8 [H, W, 3]."""

    pixels: np.ndarray


def encoded_by(model: MixedModel, image: SourceImage) -> Encoded:
    """Rows of an image, fitted as it asks."""
    encode = model.encode_stretched if image.is_stretched else model.encode_source
    return encode(image.pixels, image.digest)


def shared_text(job: ImageJob, stages: ImageStages) -> TextIdentity | None:
    """The identity of a text that others may have too; None where each job writes its own."""
    return None if stages.texts is None else text_identity(job, stages.model.card)


def prefill(request: Request[ImageJob], stages: ImageStages) -> Prefilled:
    """Read and encode the sources, once for both stages; prefill the AR stage's prompt, and its
    text where that is known.
    """
    job, clock = request.job, request.clock
    clock.enter("read")
    images: list[SourceImage] = []
    for path in job.images:
        image, overlapped_s = stages.read(path)
        clock.overlapped("read", overlapped_s)
        images.append(image)
    clock.enter("encode")
    request.source_digests = tuple(image.digest for image in images)
    sources: list[Encoded] = []
    for image in images:
        encoded, overlapped_s = stages.encode(
            image.stretched() if job.infer_align_image_size else image
        )
        if overlapped_s:
            clock.overlapped("encode", overlapped_s)
        sources.append(encoded)
    clock.enter("prefill")
    before = stages.model.rows_seen
    writing, cached = _replayed(job, stages, sources) or (job, None)
    identity = shared_text(job, stages)
    if cached is None and identity is not None and stages.texts is not None:
        cached = stages.texts.find((identity, request.source_digests))
    context, prompt, shared = Context([], None, None), list[Segment](), 0
    if stages.draws or cached is None:
        context, prompt, shared = _context(writing, stages, sources, cached)
    is_writing = job.writes_text and cached is None and context.buffer is not None
    clock.enter("queue")
    request.notes += [note for image in images for note in image.notes]
    request.notes += [note for source in sources for note in source.notes]
    request.warnings += [warning for source in sources for warning in source.warnings]
    return Prefilled(
        **vars(request),
        sources=sources,
        source_sizes=tuple(Size(*image.pixels.shape[:2]) for image in images),
        context=context,
        decoding=DecodeRequest(job, stages.model, context) if is_writing else None,
        computed=stages.model.rows_seen - before,
        shared=shared,
        prompt=prompt,
        cached=cached,
        reference=_reference(request, stages, images),
    )


def _reference(
    request: Request[ImageJob], stages: ImageStages, images: Sequence[SourceImage]
) -> np.ndarray | None:
    """The kept source as the model would give it back, in the size that is drawn."""
    job = request.job
    if job.outside is None or not stages.draws or stages.round_trip is None:
        return None
    bucket = stages.model.card.bucket_of(job.size)
    assert bucket is not None, "an edit that keeps its source is drawn in its size"
    pixels, note = stages.round_trip(images[job.outside.kept_source - 1], bucket.size)
    request.warnings += [note] if note else []
    return pixels


def share_text(work: Prefilled, stages: ImageStages) -> None:
    """Give a text that is whole, and its K/V, to the jobs that would write or feed the same."""
    identity = shared_text(work.job, stages)
    if work.decoding is not None and identity is not None and stages.texts is not None:
        cached = work.as_cached(work.decoding.generated(stages.model))
        stages.texts.get((identity, work.source_digests), lambda: cached)
    is_own = work.decoding is not None or (work.cached is not None and work.cot_from is None)
    if not (is_own and stages.draws):
        return
    assert work.context.buffer is not None, "a job with a text has a context"
    behind = TextSegment(tuple(work.context.ids[work.prompt_stop - 1 :]))
    try:
        stages.prefixes.keep([*work.prompt, behind], work.context.buffer)
    except torch.OutOfMemoryError:
        logger.warning("%s: no memory to leave its text's K/V to others", work.job.custom_id)


def with_text(work: Prefilled, stages: ImageStages) -> Generated:
    """Lay out the sequence of the diffusion stage; nothing is computed for it yet."""
    model, text = stages.model, GeneratedText()
    if work.cached is not None:
        text = work.cached.text
    elif work.decoding is not None:
        text = work.decoding.generated(model)
    elif work.context.buffer is not None:
        # No decode step: what is left to decide follows from the prompt's own last logits.
        text = GeneratedText(ending=model.ending(work.context))
    canvas = model.canvas(work.job, work.sources, text)
    work.notes.extend(canvas.notes)
    work.warnings.extend(canvas.warnings)
    if work.decoding is not None and model.graphs is not None:
        work.warnings.extend(filter(None, [model.graphs.degraded(work.batch["think"])]))
    work.clock.enter("queue")
    reuse = ReuseReport(
        "none",
        work.computed,
        work.shared,
        ar_decode_tokens=len(work.context.ids) - work.computed - work.shared,
        branches=(),
        reason="the text alone was asked for",
        ar_surplus_tokens=work.decoding.overdecoded if work.decoding else 0,
        ar_taken_tokens=len(work.cached.fed) if work.cached else 0,
    )
    return Generated(**vars(work), text=text, canvas=canvas, reuse=reuse)


def with_branches(work: Generated, stages: ImageStages) -> Denoising:
    """Build the branches on the prefix that the AR stage left, and release that; draw the noise."""
    model, prefixes = stages.model, stages.prefixes if stages.reuse.kv_reuse else None
    builder = BranchBuilder(model, work.canvas, work.sources, prefixes=prefixes, clock=work.clock)
    branches, tokens = builder.build(work.context)
    reuse = reuse_of(tokens, work.context, of_text=work.reuse, reuse=stages.reuse)
    work.release_context()
    work.clock.enter("queue")
    track = model.track(work.job, work.canvas, len(branches))
    velocities = track.velocity_cache(work.job.step_cache)
    return Denoising(
        **(vars(work) | {"reuse": reuse}),
        branches=branches,
        track=track,
        latents_CYX=track.noise_CYX,
        velocities=velocities,
    )


def decode(work: Denoising, stages: ImageStages) -> Decoded:
    """Decode the last latents. Raises OutputError for a picture that shows nothing."""
    work.clock.enter("decode_latents")
    if not torch.isfinite(work.latents_CYX).all():
        raise OutputError("the latents are not finite", code="output-image.not-finite")
    pixels = _pixels(stages.model.decode_latents(work.latents_CYX))
    if work.job.infer_align_image_size and work.job.outside is None:
        pixels = aligned(pixels, work.bucket, work.source_sizes, stages.model.card)
    work.clock.enter("queue")
    return Decoded(**vars(work), pixels=pixels)


def aligned(pixels: Pixels, bucket: Bucket, sources: Sequence[Size], card: ModelCard) -> Pixels:
    """A picture in its source's shape: the last step of `infer_align_image_size`.

    `pixels`, drawn in `bucket`, are resized to the shape of the first source that was fitted to
    that bucket; the area is that of the model's square. As they are where no source was, or its
    ratio is theirs.
    """
    drawn = bucket.size.height / bucket.size.width
    for size in sources:
        if card.nearest_bucket(size.height, size.width) == bucket:
            ratio = size.height / size.width
            if abs(ratio - drawn) < _SAME_RATIO:
                return pixels
            height, width = card.base_size * sqrt(ratio), card.base_size / sqrt(ratio)
            return stretch(pixels, Size(max(1, round(height)), max(1, round(width))))
    return pixels


def _replayed(
    job: ImageJob, stages: ImageStages, sources: list[Encoded]
) -> tuple[ImageJob, CachedText] | None:
    """The job as it wrote its given text, and that text; None where nothing was noted of it, or it
    does not fit behind the prompt.
    """
    replay, model = Replay.of(job), stages.model
    opening = None if replay is None else model.opening(replay.job, sources)
    if replay is None or opening is None:
        return None
    count = len(model.script(replay.job).opening)
    runs = replay.runs(count)
    if not runs or len(opening.ids) + sum(map(len, runs)) > opening.capacity:
        return None
    text = GeneratedText(replay.ids, model.decode_text(replay.ids), replay.cut, replay.ending)
    return replay.job, CachedText(text, replay.fed(count), runs, job.custom_id)


def _context(
    job: ImageJob, stages: ImageStages, sources: list[Encoded], cached: CachedText | None
) -> tuple[Context, list[Segment], int]:
    """The AR stage's context; its prompt but the last token, to share; and how many of its tokens
    other jobs had computed.
    """
    model = stages.model
    opening = model.opening(job, sources)
    if opening is None:
        return Context([], None, None), [], 0
    ids, stop = opening.ids, len(opening.ids)
    buffer = model.new_buffer(opening.capacity)
    # The last token is computed in any case: what follows is chosen from its hidden row.
    segments = model.segments(opening.layout, ids, sources, stop - 1)
    behind = [] if cached is None else [TextSegment((ids[stop - 1], *cached.fed))]
    shared = stages.prefixes.start([*segments, *behind], buffer)
    context = Context(list(ids), buffer, None, opening.layout)
    if shared < stop:
        context.hidden_M = model.prefill(opening.layout, ids, sources, buffer, stop)
        stages.prefixes.keep(segments, buffer)
    if cached is not None:
        # What the tree did not have of the text is computed again: on a CPU by its runs, which
        # gives the same bits; elsewhere bits depend on the batch anyway.
        context.ids.extend(cached.fed)
        left = context.ids[buffer.length :]
        is_exact = buffer.length == stop and model.layer_devices[0].type == "cpu"
        if left:
            model.feed([(context, run) for run in (cached.runs if is_exact else [left])])
        buffer.withdraw(len(context.ids))
    return context, segments, shared


def _pixels(levels: Tensor) -> Pixels:
    """Values in [0, 1] as uint8; raises OutputError for a picture that shows nothing."""
    pixels: Pixels = (levels * 255).round().to(torch.uint8).numpy()
    if pixels.min() == pixels.max():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
