"""One video from job to frames, a stage a call: encode, denoise, decode_latents, then written.
Latents that an earlier attempt has kept stand for the steps before them.

A video is encoded while it is decoded; no more than two pieces of its frames are held:

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised

A stage raises JobError for what is wrong with its job alone. Nothing of a job outlives it: its
denoiser is made for it, whatever became of the one before. Clips that are denoised together, where
that was asked for since it rounds differently, are encoded and decoded alone, with their own noise,
camera, text and picture.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import OutputError
from hyimg_cli.journal.keys import source_digest
from hyimg_cli.models.latent_video import (
    LATENTS,
    ClipsModel,
    ImageConditioning,
    LatentVideoModel,
    PromptEmbedding,
    VideoDenoiser,
)
from hyimg_cli.pipelines.clock import PhaseClock, compiling_apart
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Finished, Request
from hyimg_cli.pipelines.video.encodings import Encodings
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import DecodeTiles
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport, Progress, StepCacheReport
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.work import video_work

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Stage: TypeAlias = Generator[Progress, None, Result]
# Begins a new file; given the tiles of a decode that was short of memory, None for the model's own.
NewWriter = Callable[[DecodeTiles | None], "VideoWriter"]
# What a job's forwards depend on but for the length of its text, which is trimmed to each prompt:
# model, size, frames, branches.
VideoShape = tuple[str, Size, int, int]
# Videos of a shape that are worth a step beforehand.
_FEWEST = 3
_KEPT = "its denoised latents are kept: the next attempt only decodes them"


@dataclass(eq=False)
class VideoWork(Request[VideoJob]):
    """A video on its way. `checkpoint`: the place for its latents; `new_writer`: begins its file;
    None where nothing is written. `input_warnings` of what was cut or left out of its inputs, and
    `input_notes` of what reading its pictures changed, are kept with its latents.
    """

    checkpoint: LatentsCheckpoint | None = None
    new_writer: NewWriter | None = None
    input_warnings: tuple[str, ...] = ()
    input_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedConditions:
    """Conditions of a job's denoising: embeddings by text, `start` of its pictures by kind."""

    texts: Mapping[str, PromptEmbedding]
    start: Mapping[str, Tensor]


@dataclass(frozen=True)
class Denoised:
    """Latents behind the last of `steps` denoise steps, how many a step cache estimated, and of how
    many clips that were denoised `together` they are.
    """

    latents_BCFYX: Tensor
    steps: int
    step_cache: StepCacheReport | None = None
    together: int = 1


@dataclass(eq=False, kw_only=True)
class Frames(Finished[VideoJob]):
    """A video, every frame of it encoded by `writer`, None where it is written nowhere;
    `parallel`: over which ranks, None without.

    `denoise_steps` are those of this run: a job that went on from kept latents has fewer;
    `step_cache` counts those of all its attempts.
    """

    writer: "VideoWriter | None"
    denoise_steps: int
    step_cache: StepCacheReport | None = None
    together: int = 1
    parallel: ParallelReport | None = None


@dataclass(frozen=True)
class VideoStages:
    """A loaded model's stages. `prompts` and `pictures` keep what was embedded; `forget_pictures`
    drops what pictures keep on the same device; `compiles`: blocks, as they are met.
    """

    model: LatentVideoModel
    prompts: Encodings[str]
    pictures: Encodings[ImageConditioning]
    ranks: VideoRanks | None = None
    forget_pictures: Callable[[], object] = int
    compiles: bool = False

    def make_video(self, work: VideoWork, denoised: Denoised | None = None) -> Stage[Frames]:
        """Make a video but for the end of its file; each stage is tried as `out_of_memory` says.
        `denoised`: together with others, before.
        """
        checkpoint, done_before = work.checkpoint, 0
        work.clock.enter("read")
        if denoised is None:
            kept = None if checkpoint is None else checkpoint.found()
            done_before = 0 if kept is None else kept.step
            if kept is not None and kept.is_last:
                work.warnings.extend(kept.warnings)
                work.notes.extend(kept.notes)
                counted = VelocityCache(work.job.step_cache, ())
                counted.restore(kept.state, self.model.device)
                latents_BCFYX = kept.latents_BCFYX.to(self.model.device)
                denoised = Denoised(latents_BCFYX, kept.steps, counted.report())
            else:
                encoded = yield from self._alone(work, partial(self.encode, work))
                denoised = yield from self._alone(work, partial(self.denoise, work, encoded))
        if checkpoint is not None and checkpoint.holds_last:
            work.warnings_if_lost.append(_KEPT)
        writer = yield from self._decode_alone(work, denoised)
        return Frames(
            **vars(work.as_begun()),
            writer=writer,
            denoise_steps=denoised.steps - done_before,
            step_cache=denoised.step_cache,
            together=denoised.together,
            parallel=None if self.ranks is None else self.ranks.report(),
        )

    def encode(self, work: VideoWork, *, is_counted: bool = True) -> Stage[EncodedConditions]:
        """Embed every string and picture the job reads; mostly it is in memory."""
        job, model = work.job, self.model
        yield Progress(job.custom_id, "encode")
        work.clock.enter("encode")
        texts = {
            text: self.prompts.of(model.prompts, text, is_counted=is_counted)
            for text in dict.fromkeys(model.texts(job))
        }
        views = {
            view.kind: self.pictures.of(model.pictures, view, is_counted=is_counted)
            for view in model.pictures.views(job, work.source_digests)
        }
        warnings = [note for text in texts.values() for note in text.notes]
        for one in (*texts.values(), *views.values()):
            warnings.extend(one.warnings)
        warnings.extend(model.notes(job))
        work.input_warnings = tuple(dict.fromkeys(warnings))
        work.input_notes = tuple(note for view in views.values() for note in view.notes)
        work.warnings.extend(work.input_warnings)
        work.notes.extend(work.input_notes)
        return EncodedConditions(texts, {kind: view.tensors[kind] for kind, view in views.items()})

    def denoise(self, work: VideoWork, encoded: EncodedConditions) -> Stage[Denoised]:
        """Every denoise step behind the kept latents."""
        begin = partial(self.model.denoiser, work.job, encoded.texts, encoded.start)
        kept = None if work.checkpoint is None else work.checkpoint.found()
        (denoised,) = yield from self._denoise_all([work], begin, kept)
        return denoised

    def denoise_together(self, works: Sequence[VideoWork]) -> Stage[dict[str, Denoised]]:
        """Latents behind the last step by id; none of those that are to be made alone: they have
        kept latents, or, whatever went wrong, they failed together.
        """
        model = self.model
        assert isinstance(model, ClipsModel), "it was asked how many clips it takes together"
        new = [work for work in works if not (work.checkpoint and work.checkpoint.path.exists())]
        if len(new) < 2:
            return {}
        with Attempt() as tried:
            clips = []
            for work in new:
                one = yield from self.encode(work)
                clips.append((work.job, one.texts[work.job.prompt], one.start[LATENTS]))
            made = yield from self._denoise_all(new, partial(model.denoiser_of, clips))
            for work in new:
                work.clock.enter("queue")
            return {work.job.custom_id: one for work, one in zip(new, made, strict=True)}
        assert tried.error is not None, "the clips gave nothing"
        reason = "out of memory" if isinstance(tried.error, torch.OutOfMemoryError) else tried.error
        note = f"{len(new)} clips failed together ({reason}); each was made alone"
        logger.warning(note)
        for work in new:
            work.warnings.append(note)
        tried.error.__traceback__ = tried.error.__context__ = None
        torch.cuda.empty_cache()
        return {}

    def decode(
        self,
        work: VideoWork,
        denoised: Denoised,
        tiles: DecodeTiles | None = None,
        tiling: TileRule | None = None,
    ) -> Stage["VideoWriter | None"]:
        """Decode the last latents into frames, which are encoded as they come; `tiles`,
        and the `tiling` that they are: instead of the model's own.
        """
        yield Progress(work.job.custom_id, "decode_latents")
        work.clock.enter("decode_latents")
        decoded = self.model.decode_latents(denoised.latents_BCFYX, tiling)
        writer = None if work.new_writer is None else work.new_writer(tiles)
        # Left in the middle it would go on keeping features of its frames.
        with closing(checked(work.job, decoded)) as pieces:
            if writer is None:
                deque(pieces, maxlen=0)
            else:
                work.clock.overlapped_s["write"] += _encode_beside(pieces, writer)
        work.clock.enter("queue")
        return writer

    def prewarm(self, jobs: Sequence[VideoJob], warmed: set[VideoShape]) -> int:
        """Run one denoise step of every shape of several jobs that is not in `warmed` yet, and add
        it; how many ran. Its latents are kept nowhere, and every random draw has a generator of its
        own.

        Nothing is decoded: that would cost as much as a job's own decode, and what it made ready,
        an allocator's pieces, the next denoise step gives back. A shape of one or two jobs is left
        alone: the step would cost them more than the first of them waits for it. One whose stand-in
        fails is not counted: the job itself will fail, and say why.
        """
        if not starts_slowly(self.model.device):
            return 0
        alike: dict[VideoShape, list[VideoJob]] = defaultdict(list)
        for job in jobs:
            alike[job.model, job.size, job.num_frames, job.branch_count].append(job)
        ran = 0
        for shape, same in alike.items():
            if len(same) < _FEWEST or shape in warmed:
                continue
            warmed.add(shape)
            stand_in = replace(same[0], custom_id="prewarm", num_inference_steps=1)
            with Attempt() as tried:
                digests = tuple(map(source_digest, stand_in.images))
                clock = PhaseClock(0.0, lambda: None)
                work = VideoWork(stand_in, clock, source_digests=digests)
                deque(self._rehearse(work), maxlen=0)
            ran += tried.error is None
        return ran

    def drop(self) -> None:
        """Free what is on the device and no step needs: encoders, and what pictures keep there."""
        self.model.prompts.release()
        self.model.pictures.release()
        self.forget_pictures()

    def _rehearse(self, work: VideoWork) -> Stage[Denoised]:
        encoded = yield from self.encode(work, is_counted=False)
        return (yield from self.denoise(work, encoded))

    def _alone(self, work: VideoWork, stage: Callable[[], Stage[Result]]) -> Stage[Result]:
        memory = MemoryPolicy(self.drop, "the text encoders and the prefixes of pictures")
        return memory.alone(work, stage)

    def _decode_alone(self, work: VideoWork, denoised: Denoised) -> Stage["VideoWriter | None"]:
        """The decode where memory may be short: once more without any rank's transformer on the
        device, the same pixels; then in smaller tiles. Each time the file begins anew.
        """
        own = partial(self.decode, work, denoised)

        def drop() -> None:
            self.drop()
            self.model.release_transformer()
            if self.ranks is not None:
                self.ranks.release_branches()

        def smaller() -> Iterator[tuple[str, Callable[[], Stage["VideoWriter | None"]]]]:
            for tiles, tiling in self.model.smaller_tilings(denoised.latents_BCFYX):
                side = tiling.tile * self.model.card.pixels_per_cell
                note = (
                    f"out of memory in the decode; it went on in tiles of {side} pixels: other "
                    "pixels near their borders"
                )
                yield note, partial(own, tiles, tiling)

        kept = "the text encoders, the transformer and the prefixes of pictures"
        return MemoryPolicy(drop, kept).alone(work, own, smaller())

    def _denoise_all(
        self,
        works: Sequence[VideoWork],
        begin: Callable[[], VideoDenoiser],
        kept: Kept | None = None,
    ) -> Stage[list[Denoised]]:
        """Every denoise step of one video, behind its `kept` latents, or of several clips together;
        none is read on the host unless it is kept.
        """
        for work in works:
            count = video_work(work.job, self.model.card).steps
            yield Progress(work.job.custom_id, "denoise", 0, count)
            work.clock.enter("denoise_first")
        denoiser, is_alone = begin(), len(works) == 1
        if kept is None:
            first, latents_BCFYX = 0, denoiser.initial_latents()
        else:
            denoiser.restore(kept.step, kept.state)
            first, latents_BCFYX = kept.step, kept.latents_BCFYX.to(self.model.device)
        steps, compiles = denoiser.steps, self.compiles and is_alone
        for index in range(first, steps):
            phase, step = "denoise_first" if index == first else "denoise_rest", index + 1
            with compiling_apart(works[0].clock, phase, is_on=compiles):
                latents_BCFYX = denoiser.step(index, latents_BCFYX)
            for work, latents_1CFYX in zip(works, latents_BCFYX.split(1), strict=True):
                if index == first:
                    work.clock.enter("denoise_rest")
                place = work.checkpoint
                if place is not None and (place.is_due(step, steps) or denoiser.is_stop(step)):
                    work.clock.enter("write")
                    memory = denoiser if step < steps else denoiser.velocities
                    state = memory.state() if is_alone else {}
                    said = (work.input_warnings, work.input_notes)
                    place.keep(Kept(step, steps, latents_1CFYX, state, *said))
                    work.clock.enter("denoise_rest")
                yield Progress(work.job.custom_id, "denoise", step, steps)
        report = denoiser.velocities.report() if is_alone else None
        made = latents_BCFYX.split(1)
        return [Denoised(latents_1CFYX, steps, report, len(works)) for latents_1CFYX in made]


def starts_slowly(device: torch.device) -> bool:
    """True if the first forward of a shape takes longer there than those behind it."""
    return device.type != "cpu"


def _encode_beside(pieces: Iterator[np.ndarray], writer: "VideoWriter") -> float:
    """Encode each piece while the next one is decoded; seconds that it took. Where either fails
    nothing is left of the file.
    """
    seconds = 0.0
    try:
        with ThreadPoolExecutor(1) as thread:
            behind = WriteBehind[None](thread)
            for piece in pieces:
                seconds += sum(took for _, took in behind.finished(wait=True))
                behind.submit(partial(writer.add, piece))
            return seconds + sum(took for _, took in behind.finished(wait=True))
    except BaseException:
        writer.close()
        raise


def checked(job: VideoJob, pieces: Iterator[np.ndarray]) -> Generator[np.ndarray, None, None]:
    """`pieces` as they come; raises OutputError where they are not the video asked for, or show
    nothing.
    """
    expected = (job.num_frames, job.size.height, job.size.width, 3)
    count, levels = 0, set[int]()
    found: tuple[int, ...] = ()
    for piece in pieces:
        count += len(piece)
        found = (count, *piece.shape[1:])
        levels |= {int(piece.min()), int(piece.max())}
        yield piece
    if found != expected:
        what = f"the model gave frames of the shape {found}, not {expected}"
        raise OutputError(what, code="output-video.shape")
    if len(levels) == 1:
        raise OutputError("every pixel of every frame is the same", code="output-video.constant")
