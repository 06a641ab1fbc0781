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
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

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
)
from hyimg_cli.pipelines.clock import PhaseClock, compiling_apart
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.pipelines.video.encodings import Encodings
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.settings.run import DecodeTiles
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport, Progress
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.work import video_work

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter

# Begins a new file; given the tiles of a decode that was short of memory, None for the model's own.
NewWriter = Callable[[DecodeTiles | None], "VideoWriter"]
Events = Iterator["Progress | VideoRequest | Lost[VideoJob]"]
# What a job's forwards depend on but for the length of its text, which is trimmed to each prompt:
# model, size, frames, branches.
VideoShape = tuple[str, Size, int, int]
# Videos of a shape that are worth a step beforehand.
_FEWEST = 3
_KEPT = "its denoised latents are kept: the next attempt only decodes them"


@dataclass(eq=False)
class VideoRequest(Request[VideoJob]):
    """A video on its way, and what its stages have made of it.

    `checkpoint`: the place for its latents; `new_writer`: begins its file; None where nothing is
    written. `input_warnings` of what was cut or left out of its inputs, and `input_notes` of what
    reading its pictures changed, are kept with its latents. `texts`: embeddings by text; `start` of
    its pictures by kind. `latents_BCFYX`: those behind its last denoise step. `denoise_steps` are
    those of this run, which began at `first_step`; `step_cache` counts those of all its attempts.
    `together`: how many clips were denoised at once. `writer` has every frame of it encoded;
    `parallel`: over which ranks, None without.
    """

    checkpoint: LatentsCheckpoint | None = None
    new_writer: NewWriter | None = None
    input_warnings: tuple[str, ...] = ()
    input_notes: tuple[str, ...] = ()
    texts: Mapping[str, PromptEmbedding] = field(default_factory=dict)
    start: Mapping[str, Tensor] = field(default_factory=dict)
    latents_BCFYX: Tensor | None = None
    first_step: int = 0
    together: int = 1
    writer: "VideoWriter | None" = None
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

    def make_videos(self, works: Sequence[VideoRequest]) -> Events:
        """Make videos but for the end of their files, those that have no step behind them denoised
        together; each stage is tried as `out_of_memory` says.
        """
        for work in works:
            yield from self._attempt([work], self.encode)
        left = [work for work in works if work.texts]
        begun = [work for work in left if work.checkpoint and work.checkpoint.path.exists()]
        new = [work for work in left if work not in begun]
        for batch in filter(None, [new, *([work] for work in begun)]):
            yield from self._attempt(batch, self.denoise)
        for work in works:
            if work.checkpoint is not None and work.checkpoint.holds_last:
                work.warnings_if_lost.append(_KEPT)
            if work.latents_BCFYX is not None:
                yield from self._decode_anyhow(work)

    def encode(self, work: VideoRequest, *, is_counted: bool = True) -> Events:
        """Embed every string and picture the job reads; mostly it is in memory. Latents that are
        kept from behind its last step need none of it.
        """
        job, model = work.job, self.model
        work.clock.enter("read")
        kept = None if work.checkpoint is None else work.checkpoint.found()
        if kept is not None and kept.is_last:
            work.warnings.extend(kept.warnings)
            work.notes.extend(kept.notes)
            counted = VelocityCache(job.step_cache, ())
            counted.restore(kept.state, model.device)
            work.step_cache = counted.report()
            work.latents_BCFYX = kept.latents_BCFYX.to(model.device)
            return
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
        work.first_step = 0 if kept is None else kept.step
        work.start = {kind: view.tensors[kind] for kind, view in views.items()}
        work.texts = texts
        work.clock.enter("queue")

    def denoise(self, *works: VideoRequest) -> Events:
        """Every denoise step of one video, behind its kept latents, or of several new clips
        together; none is read on the host unless it is kept.
        """
        for work in works:
            count = video_work(work.job, self.model.card).steps
            yield Progress(work.job.custom_id, "denoise", 0, count)
            work.clock.enter("denoise_first")
        model, is_alone, work = self.model, len(works) == 1, works[0]
        kept = None
        if is_alone:
            denoiser = model.denoiser(work.job, work.texts, work.start)
            kept = None if work.checkpoint is None else work.checkpoint.found()
        else:
            assert isinstance(model, ClipsModel), "it was asked how many clips it takes together"
            denoiser = model.denoiser_of(
                [(one.job, one.texts[one.job.prompt], one.start[LATENTS]) for one in works]
            )
        if kept is None:
            first, latents_BCFYX = 0, denoiser.initial_latents()
        else:
            denoiser.restore(kept.step, kept.state)
            first, latents_BCFYX = kept.step, kept.latents_BCFYX.to(model.device)
        steps, compiles = denoiser.steps, self.compiles and is_alone
        for index in range(first, steps):
            phase, step = "denoise_first" if index == first else "denoise_rest", index + 1
            with compiling_apart(work.clock, phase, is_on=compiles):
                latents_BCFYX = denoiser.step(index, latents_BCFYX)
            for one, latents_1CFYX in zip(works, latents_BCFYX.split(1), strict=True):
                if index == first:
                    one.clock.enter("denoise_rest")
                place = one.checkpoint
                if place is not None and (place.is_due(step, steps) or denoiser.is_stop(step)):
                    one.clock.enter("write")
                    memory = denoiser if step < steps else denoiser.velocities
                    state = memory.state() if is_alone else {}
                    said = (one.input_warnings, one.input_notes)
                    place.keep(Kept(step, steps, latents_1CFYX, state, *said))
                    one.clock.enter("denoise_rest")
                yield Progress(one.job.custom_id, "denoise", step, steps)
        for one, latents_1CFYX in zip(works, latents_BCFYX.split(1), strict=True):
            one.latents_BCFYX, one.together = latents_1CFYX, len(works)
            one.denoise_steps = steps - one.first_step
            one.step_cache = denoiser.velocities.report() if is_alone else None
            one.clock.enter("queue")

    def decode(
        self, work: VideoRequest, tiles: DecodeTiles | None = None, tiling: TileRule | None = None
    ) -> Events:
        """Decode the last latents into frames, which are encoded as they come: then it is done.
        `tiles`, and the `tiling` that they are: instead of the model's own.
        """
        assert work.latents_BCFYX is not None, "it is denoised"
        yield Progress(work.job.custom_id, "decode_latents")
        work.clock.enter("decode_latents")
        decoded = self.model.decode_latents(work.latents_BCFYX, tiling)
        writer = None if work.new_writer is None else work.new_writer(tiles)
        # Left in the middle it would go on keeping features of its frames.
        with closing(checked(work.job, decoded)) as pieces:
            if writer is None:
                deque(pieces, maxlen=0)
            else:
                work.clock.overlapped_s["write"] += _encode_beside(pieces, writer)
        work.clock.enter("queue")
        work.writer, work.parallel = writer, None if self.ranks is None else self.ranks.report()
        work.texts, work.start, work.latents_BCFYX = {}, {}, None
        yield work

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
                work = VideoRequest(stand_in, clock, source_digests=digests)
                deque(chain(self.encode(work, is_counted=False), self.denoise(work)), maxlen=0)
            ran += tried.error is None
        return ran

    def drop(self) -> None:
        """Free what is on the device and no step needs: encoders, and what pictures keep there."""
        self.model.prompts.release()
        self.model.pictures.release()
        self.forget_pictures()

    def _attempt(self, works: Sequence[VideoRequest], stage: Callable[..., Events]) -> Events:
        memory = MemoryPolicy(self.drop, "the text encoders and the prefixes of pictures")
        return memory.attempt(works, stage, lambda work, error: [work.as_lost(error)])

    def _decode_anyhow(self, work: VideoRequest) -> Events:
        """The decode where memory may be short: once more without any rank's transformer on the
        device, the same pixels; then in smaller tiles. Each time the file begins anew.
        """
        assert work.latents_BCFYX is not None, "it is denoised"

        def drop() -> None:
            self.drop()
            self.model.release_transformer()
            if self.ranks is not None:
                self.ranks.release_branches()

        kept = "the text encoders, the transformer and the prefixes of pictures"
        memory = MemoryPolicy(drop, kept)
        tilings = iter(self.model.smaller_tilings(work.latents_BCFYX))

        def decode_smaller(work: VideoRequest, error: Exception) -> Events:
            is_short = isinstance(error, torch.OutOfMemoryError)
            tiles, tiling = next(tilings, (None, None)) if is_short else (None, None)
            if tiling is None:
                yield work.as_lost(error)
                return
            side = tiling.tile * self.model.card.pixels_per_cell
            note = f"it went on in tiles of {side} pixels: other pixels near their borders"
            memory.note([work], f"out of memory in the decode; {note}")
            smaller = partial(self.decode, tiles=tiles, tiling=tiling)
            yield from memory.attempt([work], smaller, decode_smaller)

        yield from memory.attempt([work], self.decode, decode_smaller)


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
