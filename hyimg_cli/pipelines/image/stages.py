"""One picture from job to pixels, one call per stage.

    read ─▶ prefill ─▶ text decoded ─▶ end_text ─▶ build_branches ─▶ all denoise steps ─▶ decode

An `ImageRequest` goes through the stages and holds their results. `batch.py` runs prefills, decode
steps and denoise steps for several jobs together. A stage raises JobError for a fault of its job
alone.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan, DenoiseState
from hyimg_cli.errors import JobError, OutputError
from hyimg_cli.kv.segments import Segment, TextSegment
from hyimg_cli.manifest.planner import TextIdentity, text_identity
from hyimg_cli.manifest.written import Replay
from hyimg_cli.media.images import Pixels, SourceImage, stretch
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Answer, Canvas, Context, Encoded, GeneratedText, Prefill
from hyimg_cli.pipelines.image.branches import BranchBuilder, Prefixes, reuse_of
from hyimg_cli.pipelines.image.choices import Choice, choose_answer
from hyimg_cli.pipelines.image.confidence import read_confidence
from hyimg_cli.pipelines.image.prefill import Prefilling
from hyimg_cli.pipelines.image.think import CachedText, DecodeRequest, Texts
from hyimg_cli.pipelines.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.request import Request, confirm_visible
from hyimg_cli.pipelines.round_trips import RoundTrips
from hyimg_cli.settings.run import ReuseConfig
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.events import ReuseReport
from hyimg_cli.spec.job import ImageJob, Size, TextJob, View

logger = logging.getLogger(__name__)
ReadSource = Callable[[View], tuple[SourceImage, float]]
EncodeSource = Callable[..., tuple[Encoded, float]]
# Tolerance of height / width in `infer_align_image_size`. Source: HunyuanImage-3.0-Instruct.
_SAME_RATIO = 0.01
# What the bytes of a character are decoded to until the token with the last of them is written.
_INCOMPLETE = "\ufffd"
NO_CHOICE = "the model does not answer with one of the choices"


class ImageRequest(Request[ImageJob]):
    """A picture at work; each stage sets its fields.

    `stages`: the stages of its scope. `ticket`: whom its events are told. `text_key`: equal for
    requests that would write or feed the same text. `decoding`: None if there is no text to write.

    `prefixes`: those that it looks up. `writing`: the job as it was when it wrote its text, if that
    is replayed; else the job.

    `computed`, `shared`: rows of the prompt that were computed, and rows that other jobs had left.
    `prompt`: all but its last token, as other jobs may share it. `cached`: the text once it is
    complete. A text that was written before is set from the start; its rows are in the context and
    count like the prompt's.

    `kept`: the latents and the text from which it continues, if an earlier attempt saved them.
    `text_warnings`: what was degraded while its text was written. `answer`: of a job that asks for
    a text; `choice`: of one that gives the answers.

    `batch`: the largest number of jobs at work together, by stage. `pixels`: None if the job ends
    with its text.
    """

    stages: "ImageStages"
    ticket: Ticket
    kept: Kept | None = None
    text_warnings: tuple[str, ...] = ()
    text_key: Hashable | None = None
    sources: list[Encoded]
    source_sizes: tuple[Size, ...]
    writing: ImageJob
    prefixes: Prefixes | None = None
    context: Context
    decoding: DecodeRequest | None = None
    computed: int
    shared: int
    prompt: list[Segment]
    cached: CachedText | None
    batch: dict[str, int]
    text: GeneratedText
    canvas: Canvas
    answer: Answer | None = None
    choice: Choice | None = None
    reuse: ReuseReport
    branches: tuple[Any, ...]
    denoise_plan: DenoisePlan
    denoise_state: DenoiseState

    @property
    def draws(self) -> bool:
        """True if the job ends with a picture here."""
        return self.stages.draws and self.job.draws

    @property
    def writes_text(self) -> bool:
        """True if the job is going to write its text, as none is known."""
        return self.job.writes_text and self.cached is None

    @property
    def leaves_text(self) -> bool:
        """True if jobs with the same text will find it once this one has it."""
        is_own = self.cached is not None and self.cached.writer == self.job.custom_id
        return self.text_key is not None and (self.writes_text or is_own)

    @property
    def cot_from(self) -> str | None:
        """The custom_id of the job that wrote this text; None if this job did."""
        if self.cached is None or self.cached.writer == self.job.custom_id:
            return None
        return self.cached.writer

    def anew(self) -> Self:
        """Return the request as it was at its start."""
        again = type(self)(**self.begun())
        again.stages, again.ticket = self.stages, self.ticket
        again.text_key = self.text_key
        return again

    def release(self) -> None:
        """Free all K/V and everything built on them; the request ends or begins again."""
        self.context, self.decoding = Context([], None, None), None
        self.branches, self.sources = (), []

    def release_context(self) -> None:
        """Free the context's K/V and the sources' rows once the branches exist."""
        self.context.buffer = None
        self.sources = []


@dataclass(frozen=True)
class ImageStages:
    """The stages of one picture, and the parts that all jobs of a group share.

    Without `texts` each job writes its own. With `draws` off a job ends with its text. `encode`:
    returns a source's rows in a scope. `trips`: round trips of the sources on which edits are put
    back. `checkpoint_of`: the place for a request's latents. `scope`: texts, prefixes, trips and
    encoded sources are shared only within it.
    """

    model: DecoderModel
    reuse: ReuseConfig
    prefixes: Prefixes
    read_source: ReadSource
    encode: EncodeSource
    texts: Texts | None = None
    draws: bool = True
    trips: RoundTrips | None = None
    checkpoint_of: Callable[[ImageRequest], LatentsCheckpoint | None] = lambda work: None
    scope: str = ""

    def within(self, scope: str) -> "ImageStages":
        """Return the stages of a scope."""
        encode = partial(self.encode, scope=scope)
        return replace(self, scope=scope, prefixes=self.prefixes.within(scope), encode=encode)

    def shared_text(self, job: ImageJob) -> TextIdentity | None:
        """Return the identity of a text that jobs may share; None if each writes its own."""
        return None if self.texts is None else text_identity(job, self.model.card)

    def step_rows(self, job: ImageJob) -> int:
        """Return the rows of one of the job's denoise steps, as counted to fit it into memory."""
        try:
            shapes = [Size(1, 1)] * len(job.images)
            tokens = self.model.prompter.count(job, shapes, 0)
        except JobError:
            return 0
        return int(tokens.branches * tokens.step_rows)

    def read(self, work: ImageRequest) -> None:
        """Read and encode the sources once for both stages; find the text if it is known."""
        job, clock = work.job, work.clock
        clock.enter("read")
        images: list[SourceImage] = []
        for view in job.views:
            image, overlapped_s = self.read_source(view)
            clock.overlapped_s["read"] += overlapped_s
            work.notes += image.notes
            images.append(image)
        work.source_digests = tuple(image.digests for image in images)
        work.checkpoint = self.checkpoint_of(work) if work.draws else None
        kept = work.kept = None if work.checkpoint is None else work.checkpoint.found()
        clock.enter("encode")
        work.sources = []
        for image in images:
            shown = image.stretched() if job.infer_align_image_size else image
            encoded, overlapped_s = self.encode(shown)
            if overlapped_s:
                clock.overlapped_s["encode"] += overlapped_s
            work.notes += encoded.notes
            work.warnings += encoded.warnings
            work.sources.append(encoded)
        digests = [source.digest for source in work.sources]
        work.prefixes = self.prefixes.of_job(dict(zip(digests, map(str, job.views), strict=True)))
        work.writing, work.cached = self._replayed(job, work.sources) or (job, None)
        if kept is not None and kept.text is not None:
            work.first_step = kept.step
            work.warnings += kept.warnings
            work.cached = work.cached or CachedText.of_record(kept.text)
        identity = self.shared_text(job)
        if work.cached is None and identity is not None and self.texts is not None:
            work.cached = self.texts.find((self.scope, identity, work.sources_as_read))
        work.source_sizes = tuple(Size(*image.pixels.shape[:2]) for image in images)
        work.reference = self._reference(work, images)
        work.batch = {"think": 1, "denoise": 1}
        clock.enter("queue")

    def prefill(self, work: ImageRequest) -> Prefilling[None]:
        """Prefill the AR stage's prompt, and a text that is known already."""
        work.clock.enter("prefill")
        work.computed, work.shared, work.prompt = 0, 0, []
        work.context = yield from self._context(work)
        is_writing = work.writes_text and work.context.buffer is not None
        work.decoding = DecodeRequest(work.job, self.model, work.context) if is_writing else None
        work.clock.enter("queue")

    def end_text(self, work: ImageRequest, *, is_repeated: bool) -> None:
        """Lay out the sequence of the diffusion stage, without computing anything for it.

        A text that `is_repeated` is left for the jobs that would write or feed the same text.
        """
        model, decoding, written = self.model, work.decoding, work.cached
        if decoding is not None:
            written = decoding.written(model)
        if written is not None and is_repeated:
            self._share(work, written)
        if isinstance(work.job, TextJob):
            written = self._end_answer(work, work.job, written)
        if written is None:
            # Without a decode step, the remaining choices follow from the prompt's own last logits.
            ending = () if work.context.buffer is None else model.ending(work.context)
            written = CachedText(GeneratedText(ending=ending), (), (), work.job.custom_id)
        work.text = written.text
        if work.job.draws:
            work.canvas = model.canvas(work.job, work.sources, written.text)
            work.notes += work.canvas.notes
            work.warnings += work.canvas.warnings
        if decoding is not None and model.graphs is not None:
            work.text_warnings = (*filter(None, [model.graphs.degraded(work.batch["think"])]),)
            work.warnings += work.text_warnings
        work.clock.enter("queue")
        work.reuse = ReuseReport(
            "none",
            work.computed,
            work.shared,
            ar_decode_tokens=len(work.context.ids) - work.computed - work.shared,
            branches=(),
            reason="the text alone was asked for" if work.job.draws else "",
            ar_surplus_tokens=decoding.overdecoded if decoding else 0,
            ar_taken_tokens=len(work.cached.fed) if work.cached else 0,
        )
        work.cached = written

    def answer_so_far(self, job: ImageJob, decoding: DecodeRequest) -> str:
        """Return what is written of an answer that streams; a later one continues it."""
        if not (isinstance(job, TextJob) and job.streams):
            return ""
        ids = decoding.ids_so_far
        answer = self.model.answer(job, GeneratedText(ids, self.model.decode_text(ids)))
        if job.bot_task == "think" and answer.thought is None:  # it still thinks
            return ""
        return answer.text.rstrip(_INCOMPLETE)

    def _end_answer(
        self, work: ImageRequest, job: TextJob, written: CachedText | None
    ) -> CachedText:
        """Take the answer out of the text of a job that asks for one, or make its choice."""
        work.warnings += self.model.prompter.advice(job)
        if written is not None:
            work.answer = self.model.answer(job, written.text)
            work.warnings += work.answer.warnings
            return written
        choice = choose_answer(self.model, work.context, job.choices)
        work.choice, best = choice, choice.best
        if best is None:
            work.warnings.append(f"{NO_CHOICE} (mass {choice.mass:.3g})")
        ids = self.model.prompter.choice(best) if best else ()
        work.answer = Answer(best or "", ids)
        return CachedText(GeneratedText(ids, best or ""), (), (), job.custom_id)

    def build_branches(self, work: ImageRequest) -> Prefilling[None]:
        """Build the branches on the AR stage's prefix, release its context, and draw the noise.

        A picture that an earlier attempt began continues from its latents, and needs no branches
        after its last step.
        """
        kept, count = work.kept, len(set(work.canvas.branches))
        if kept is not None and kept.is_last:
            work.reuse = replace(work.reuse, reason="only the decode was left")
        else:
            prefixes = work.prefixes if self.reuse.kv_reuse else None
            builder = BranchBuilder(self.model, work.canvas, work.sources, prefixes, work.clock)
            work.branches, tokens = yield from builder.build(work.context)
            work.reuse = reuse_of(tokens, work.context, of_text=work.reuse, reuse=self.reuse)
        work.release_context()
        work.clock.enter("queue")
        work.denoise_plan = self.model.denoise_plan(work.job, work.canvas, count)
        work.denoise_state = DenoiseState(work.denoise_plan, work.job.step_cache)
        if kept is not None:
            work.denoise_state.restore(kept.step, kept.latents, kept.state)
            work.step_cache = work.denoise_state.velocities.report()

    def keep_latents(self, work: ImageRequest) -> None:
        """Save the latents after a step if they are due, with the text that they were drawn on."""
        state = work.denoise_state
        assert work.cached is not None, "a text has ended before its picture is drawn"
        text = work.cached.record
        work.save_latents(state, state.latents, warnings=work.text_warnings, text=text)

    def decode(self, work: ImageRequest) -> None:
        """Decode the last latents. Raises OutputError for a picture that shows nothing."""
        work.clock.enter("decode_latents")
        latents_CYX = work.denoise_state.latents
        if not torch.isfinite(latents_CYX).all():
            raise OutputError("the latents are not finite", code="output-image.not-finite")
        pixels = _pixels(self.model.decode_latents(latents_CYX))
        if work.job.infer_align_image_size and work.job.outside is None:
            pixels = aligned(pixels, work.canvas.bucket, work.source_sizes, self.model.card)
        work.pixels = pixels
        work.clock.enter("queue")

    def end(self, work: ImageRequest) -> None:
        """Drop the prefixes that no job will look up after this one."""
        (work.prefixes or self.prefixes).end(work.job)

    def _reference(self, work: ImageRequest, images: Sequence[SourceImage]) -> np.ndarray | None:
        """Return the kept source after the model's own round trip, in the size that is drawn."""
        job = work.job
        if job.outside is None or not work.draws or self.trips is None:
            return None
        bucket = self.model.card.bucket_of(job.size)
        assert bucket is not None, "an edit that keeps its source is drawn in its size"
        source, trip = images[job.outside.kept_source - 1], self.model.round_trip
        pixels, note = self.trips.of(source, bucket.size, trip, self.scope)
        work.warnings += [note] if note else []
        return pixels

    def _replayed(
        self, job: ImageJob, sources: list[Encoded]
    ) -> tuple[ImageJob, CachedText] | None:
        """Return the job as it was when it wrote its given text, and that text.

        Return None if no record of the writing exists, or if it does not fit after the prompt.
        """
        replay = Replay.of(job)
        opening = None if replay is None else self.model.opening(replay.job, sources)
        if replay is None or opening is None:
            return None
        count = len(self.model.script(replay.job).opening)
        runs = replay.runs(count)
        if not runs or len(opening.ids) + sum(map(len, runs)) > opening.capacity:
            return None
        text = self.model.decode_text(replay.ids)
        written = GeneratedText(replay.ids, text, replay.cut, replay.ending)
        fed, confidence = replay.fed(count), read_confidence(replay.confidence)
        return replay.job, CachedText(written, fed, runs, job.custom_id, confidence)

    def _context(self, work: ImageRequest) -> Prefilling[Context]:
        """Return the AR stage's context; empty if no later stage needs it."""
        model, cached, sources = self.model, work.cached, work.sources
        draws = work.draws and not (work.kept is not None and work.kept.is_last)
        is_needed = draws or cached is None
        opening = model.opening(work.writing, sources) if is_needed else None
        if opening is None:
            return Context([], None, None)
        ids, stop = opening.ids, len(opening.ids)
        # The last token is always computed: its hidden row is needed to choose the next token.
        segments = work.prompt = model.segments(opening.layout, ids, sources, stop - 1)
        behind = [] if cached is None else [TextSegment((ids[stop - 1], *cached.fed))]
        shareable, prefixes = [*segments, *behind], work.prefixes
        assert prefixes is not None, "they are set when the sources are read"
        while prefixes.are_coming(shareable):
            yield []
        buffer = model.new_buffer()
        work.shared = prefixes.start(shareable, buffer)
        context = Context([*ids], buffer, None, opening.layout)
        if work.shared < stop:
            work.computed = stop - work.shared
            with prefixes.computing(segments):
                (context.hidden_M,) = yield [Prefill(opening.layout, ids, sources, buffer, stop)]
            prefixes.keep(segments, buffer)
        if cached is not None:
            # Tokens of the text that the tree lacks are computed again. On a CPU they are fed in
            # the original runs, which gives the same bits; on other devices bits depend on the
            # batch anyway.
            context.ids.extend(cached.fed)
            left = context.ids[buffer.length :]
            is_exact = buffer.length == stop and model.layer_devices[0].type == "cpu"
            if left:
                runs = cached.runs if is_exact else [left]
                model.feed([(context, run) for run in runs])
                work.computed += sum(map(len, runs))
            buffer.truncate(len(context.ids))
        return context

    def _share(self, work: ImageRequest, written: CachedText) -> None:
        """Leave a job's own text, and its K/V, for jobs that would write or feed the same text."""
        if written.writer != work.job.custom_id:
            return
        identity = self.shared_text(work.job)
        if identity is not None and self.texts is not None:
            self.texts.get((self.scope, identity, work.sources_as_read), lambda: written)
        if not work.draws or work.context.buffer is None:
            return  # nothing is drawn, or everything has been
        behind = TextSegment(tuple(work.context.ids[-len(written.fed) - 1 :]))
        try:
            assert work.prefixes is not None, "they are set when the sources are read"
            work.prefixes.keep([*work.prompt, behind], work.context.buffer, is_awaited=True)
        except torch.OutOfMemoryError:
            logger.warning("%s: no memory to leave its text's K/V to others", work.job.custom_id)


def encoded_by(model: DecoderModel, image: SourceImage) -> Encoded:
    """Return the rows of an image, fitted as its `is_stretched` says."""
    encode = model.encode_stretched if image.is_stretched else model.encode_source
    return encode(image.pixels, image.digest)


def _pixels(levels: Tensor) -> Pixels:
    """Return levels in [0, 1] as uint8. Raises OutputError for a picture that shows nothing."""
    return confirm_visible((levels * 255).round().to(torch.uint8).numpy())


def aligned(pixels: Pixels, bucket: Bucket, sources: Sequence[Size], card: ModelCard) -> Pixels:
    """Return a picture in its source's shape: the last step of `infer_align_image_size`.

    `pixels`, drawn in `bucket`, are resized to the shape of the first source that was fitted to
    that bucket, with the area of the model's square. They are returned unchanged if no source was
    fitted to it, or if the ratios are the same.
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
