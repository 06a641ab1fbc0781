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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Track
from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import OutputError
from hyimg_cli.kv.segments import Segment, TextSegment
from hyimg_cli.manifest.planner import TextIdentity, text_identity
from hyimg_cli.manifest.written import Replay
from hyimg_cli.media.images import SourceImage
from hyimg_cli.models.protocols import Canvas, Context, Encoded, GeneratedText, MixedModel
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.image.align import Origin, aligned
from hyimg_cli.pipelines.image.branches import (
    BranchBuilder,
    Branches,
    TextRows,
    report,
    report_of_text,
)
from hyimg_cli.pipelines.image.prefixes import Prefixes
from hyimg_cli.pipelines.image.texts import KnownText, Texts
from hyimg_cli.pipelines.image.think import DecodeRequest
from hyimg_cli.pipelines.request import Finished, Request, Work
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.events import ReuseReport, StepCacheReport
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.step_cache import StepCache

logger = logging.getLogger(__name__)
ReadSource = Callable[[str], tuple[SourceImage, float]]
EncodeSource = Callable[[SourceImage], tuple[Encoded, float]]
RoundTrip = Callable[[SourceImage, Size], tuple[np.ndarray, str]]


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


@dataclass(eq=False)
class Prefilled(Work[ImageJob]):
    """Its AR prompt is in its context; `decoding` is None where there is no text to write.

    `computed`, `shared`: rows of the prompt that were computed, and that other jobs had left.
    `prompt`: all but its last token, as others may share it. `taken`: the text where it had been
    written before: its rows are in the context, and count like the prompt's. `reference`: what the
    picture will be compared with, where it is put back on its source. `batch`: how many jobs
    were at work together at most, by stage.
    """

    sources: list[Encoded]
    origins: tuple[Origin, ...]
    context: Context
    decoding: DecodeRequest | None
    computed: int
    shared: int
    prompt: list[Segment]
    taken: KnownText | None = None
    reference: np.ndarray | None = None
    batch: dict[str, int] = field(default_factory=lambda: {"think": 1, "denoise": 1})

    @property
    def source_digests(self) -> tuple[str, ...]:
        return tuple(origin.digest for origin in self.origins)

    @property
    def prompt_stop(self) -> int:
        """Tokens of the AR prompt."""
        return sum(segment.length for segment in self.prompt) + 1

    def known(self, text: GeneratedText) -> KnownText:
        """The job's text, when it has ended, as others may take it over."""
        if self.taken is not None:
            return self.taken
        fed = tuple(self.context.ids[self.prompt_stop :])
        runs = tuple(self.decoding.runs) if self.decoding else ()
        return KnownText(text, fed, runs, self.job.custom_id)

    @property
    def cot_from(self) -> str | None:
        """The job whose text this is; None where it is its own."""
        if self.taken is None or self.taken.writer == self.job.custom_id:
            return None
        return self.taken.writer

    def release(self) -> None:
        """Give the context's K/V and the sources' rows back: the branches stand."""
        self.context.buffer = None
        self.sources = []


@dataclass(eq=False)
class Generated(Finished[ImageJob]):
    """It waits to be drawn, or ends here: its text is there, its K/V are the AR stage's alone."""

    prefilled: Prefilled
    text: GeneratedText
    canvas: Canvas
    denoise_steps = 0
    step_cache: StepCacheReport | None = None

    @property
    def bucket(self) -> Bucket:
        return self.canvas.bucket

    @property
    def batch(self) -> dict[str, int]:
        return self.prefilled.batch

    @property
    def written(self) -> dict[str, Any]:
        """The text and how its tokens entered the network, for `Replay`."""
        known = self.prefilled.known(self.text)
        return {
            "cut": self.text.cut,
            "ending": list(self.text.ending),
            "lengths": [len(run) for run in known.runs],
            "withdrawn": list(known.withdrawn),
        }

    @property
    def reuse(self) -> ReuseReport:
        """Reuse report of a job that ends with its text."""
        return report_of_text(text_rows(self.prefilled))

    @property
    def cot_from(self) -> str | None:
        return self.prefilled.cot_from

    @property
    def draws_with(self) -> tuple[Bucket, int, StepCache | None]:
        """Jobs of which this is equal are denoised together: as many steps, and the same ones in
        full.
        """
        return self.canvas.bucket, self.job.num_inference_steps, self.job.step_cache

    @property
    def source_digests(self) -> tuple[str, ...]:
        return self.prefilled.source_digests


@dataclass(eq=False)
class Denoising(Work[ImageJob]):
    """Its branches stand; `latents_CYX` are those behind its latest step, number `steps`.

    `velocities`: the step cache's, of the latest attempt.
    """

    generated: Generated
    branches: Branches
    reuse: ReuseReport
    track: Track
    latents_CYX: Tensor
    velocities: VelocityCache
    steps: int = 0

    @property
    def batch(self) -> dict[str, int]:
        return self.generated.prefilled.batch

    def branches_at(self, step: Step) -> tuple[Any, ...]:
        """The branches that the step evaluates."""
        return self.branches.items[: None if self.track.is_guided(step) else 1]

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
    def step_cache(self) -> StepCacheReport | None:
        return self.denoising.velocities.report()

    @property
    def text(self) -> GeneratedText:
        return self.denoising.generated.text

    @property
    def bucket(self) -> Bucket:
        return self.denoising.generated.bucket

    @property
    def reuse(self) -> ReuseReport:
        return self.denoising.reuse

    @property
    def batch(self) -> dict[str, int]:
        return self.denoising.batch

    @property
    def source_digests(self) -> tuple[str, ...]:
        return self.denoising.generated.source_digests

    @property
    def cot_from(self) -> str | None:
        return self.denoising.generated.cot_from

    @property
    def reference(self) -> np.ndarray:
        """What an edit that keeps its source is compared with."""
        found = self.denoising.generated.prefilled.reference
        assert found is not None, "it is made where the source is read"
        return found


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
    images = [_read(path, stages, clock) for path in job.images]
    clock.enter("encode")
    shown = [image.stretched() if job.infer_align_image_size else image for image in images]
    sources = [_encoded(image, stages, clock) for image in shown]
    clock.enter("prefill")
    before = stages.model.rows_seen
    writing, taken = _replayed(job, stages, sources) or (job, None)
    taken = taken or _known(job, stages, [image.digest for image in images])
    needs_context = stages.draws or taken is None
    context, prompt, shared = (
        _context(writing, stages, sources, taken)
        if needs_context
        else (Context([], None, None), [], 0)
    )
    computed = stages.model.rows_seen - before
    is_writing = job.writes_text and taken is None and context.buffer is not None
    decoding = DecodeRequest(job, stages.model, context) if is_writing else None
    clock.enter("queue")
    request.notes += [note for image in images for note in image.notes]
    request.notes += [note for source in sources for note in source.notes]
    request.warnings += [warning for source in sources for warning in source.warnings]
    origins = tuple(Origin.of(image) for image in images)
    return Prefilled(
        request,
        sources,
        origins,
        context,
        decoding,
        computed,
        shared,
        prompt,
        taken,
        _reference(request, stages, images),
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


def leave_text(work: Prefilled, stages: ImageStages) -> None:
    """Leave a text that has ended to the jobs that would write the same, and its K/V."""
    identity = shared_text(work.job, stages)
    assert work.decoding is not None, "the job wrote its text"
    assert identity is not None, "and others share it"
    assert stages.texts is not None, "which some are to do"
    known = work.known(work.decoding.generated(stages.model))
    stages.texts.add(identity, work.source_digests, known)
    if stages.draws:
        insert_prefix(work, stages)


def insert_prefix(work: Prefilled, stages: ImageStages) -> None:
    """Insert the K/V of a text that is whole into the prefixes that jobs share."""
    assert work.context.buffer is not None, "a job with a text has a context"
    behind = TextSegment(tuple(work.context.ids[work.prompt_stop - 1 :]))
    try:
        stages.prefixes.keep([*work.prompt, behind], work.context.buffer)
    except torch.OutOfMemoryError:
        logger.warning("%s: no memory to leave its text's K/V to others", work.job.custom_id)


def with_text(work: Prefilled, stages: ImageStages) -> Generated:
    """Lay out the sequence of the diffusion stage; nothing is computed for it yet."""
    model, text = stages.model, GeneratedText()
    if work.taken is not None:
        text = work.taken.text
    elif work.decoding is not None:
        text = work.decoding.generated(model)
    elif work.context.buffer is not None:
        # No decode step: what is left to decide follows from the prompt's own last logits.
        text = GeneratedText(ending=model.ending(work.context))
    canvas = model.canvas(work.job, work.sources, text)
    work.request.notes.extend(canvas.notes)
    work.warnings.extend(canvas.warnings)
    if work.decoding is not None:
        work.warnings.extend(filter(None, [model.decode_note(work.batch["think"])]))
    work.clock.enter("queue")
    return Generated(work.request, work, text, canvas)


def text_rows(work: Prefilled) -> TextRows:
    """Rows that the AR stage of a job computed, and those that it did not have to."""
    decoded = len(work.context.ids) - work.computed - work.shared
    overdecoded = work.decoding.overdecoded if work.decoding else 0
    taken = len(work.taken.fed) if work.taken else 0
    return TextRows(work.computed, work.shared, decoded, overdecoded, taken)


def with_branches(waiting: Generated, stages: ImageStages) -> Denoising:
    """Build the branches on the prefix that the AR stage left, and release that; draw the noise."""
    work, model = waiting.prefilled, stages.model
    prefixes = stages.prefixes if stages.reuse.kv_reuse else None
    builder = BranchBuilder(
        model, waiting.canvas, work.sources, prefixes=prefixes, clock=work.clock
    )
    branches = builder.build(work.context)
    reuse = report(branches, work.context, text=text_rows(work), reuse=stages.reuse)
    work.release()
    work.clock.enter("queue")
    track = model.track(waiting.job, waiting.canvas, len(branches.items))
    velocities = track.velocity_cache(waiting.job.step_cache)
    return Denoising(work.request, waiting, branches, reuse, track, track.noise_CYX, velocities)


def decode(work: Denoising, stages: ImageStages) -> Decoded:
    """Decode the last latents."""
    work.clock.enter("decode_latents")
    if not torch.isfinite(work.latents_CYX).all():
        raise OutputError("the latents are not finite", code="output-image.not-finite")
    pixels = _pixels(stages.model.decode_latents(work.latents_CYX))
    if work.job.infer_align_image_size and work.job.outside is None:
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


def _known(job: ImageJob, stages: ImageStages, digests: Sequence[str]) -> KnownText | None:
    """The job's text, where another job, or an attempt of its own, has written it."""
    identity = shared_text(job, stages)
    if identity is None or stages.texts is None:
        return None
    return stages.texts.known(identity, digests)


def _replayed(
    job: ImageJob, stages: ImageStages, sources: list[Encoded]
) -> tuple[ImageJob, KnownText] | None:
    """The job as it wrote its given text, and that text; None where nothing was noted of it, or it
    does not fit behind the prompt.
    """
    replay, model = Replay.of(job), stages.model
    opening = None if replay is None else model.opening(replay.job, sources)
    if replay is None or opening is None:
        return None
    count = len(model.opening_ids(replay.job))
    runs = replay.runs(count)
    if not runs or opening.stop + sum(map(len, runs)) > opening.capacity:
        return None
    text = GeneratedText(replay.ids, model.decode_text(replay.ids), replay.cut, replay.ending)
    return replay.job, KnownText(text, replay.fed(count), runs, job.custom_id)


def _context(
    job: ImageJob, stages: ImageStages, sources: list[Encoded], taken: KnownText | None
) -> tuple[Context, list[Segment], int]:
    """The AR stage's context; its prompt but the last token, to share; and how many of its tokens
    other jobs had computed.
    """
    model = stages.model
    opening = model.opening(job, sources)
    if opening is None:
        return Context([], None, None), [], 0
    ids, stop = opening.layout.ids, opening.stop
    buffer = model.new_buffer(opening.capacity)
    # The last token is computed in any case: what follows is chosen from its hidden row.
    segments = model.segments(opening.layout, ids, sources, stop - 1)
    if taken is not None:
        behind = TextSegment((ids[stop - 1], *taken.fed))
        shared = stages.prefixes.start([*segments, behind], buffer)
    else:
        shared = stages.prefixes.start(segments, buffer)
    context = Context(list(ids[:stop]), buffer, None, opening.layout)
    if shared < stop:
        context.hidden_M = model.prefill(opening.layout, ids, sources, buffer, stop)
        stages.prefixes.keep(segments, buffer)
    if taken is not None:
        _feed(taken, context, model)
    return context, segments, shared


def _feed(taken: KnownText, context: Context, model: MixedModel) -> None:
    """Complete the context with a text: what the tree did not have of it is computed again.

    On a CPU by its runs, which gives the same bits; elsewhere bits depend on the batch anyway.
    """
    assert context.buffer is not None, "a job with a text has a context"
    prompt = len(context.ids)
    context.ids.extend(taken.fed)
    left = context.ids[context.buffer.length :]
    is_exact = context.buffer.length == prompt and model.layer_devices[0].type == "cpu"
    if left:
        model.feed([(context, run) for run in (taken.runs if is_exact else [left])])
    context.buffer.withdraw(len(context.ids))


def _pixels(levels: Tensor) -> np.ndarray:
    """Values in [0, 1] as uint8; raises OutputError for a picture that shows nothing."""
    pixels = (levels * 255).round().to(torch.uint8).numpy()
    if pixels.min() == pixels.max():
        raise OutputError("every pixel is the same", code="output-image.constant")
    return pixels
