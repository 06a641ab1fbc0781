"""A video's latents to frames, and these to its file.

A video is encoded while it is decoded; no more than two pieces of its frames are held:

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from hyimg_cli.errors import OutputError
from hyimg_cli.journal.keys import source_digest
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.models.latent import LatentDenoiser
from hyimg_cli.models.latent_video import ClipsModel, LatentVideoModel
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.latent.stages import LatentRequest, LatentStages
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import DecodeTiles
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport, Progress
from hyimg_cli.spec.job import Size, VideoJob

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


@dataclass(eq=False)
class VideoRequest(LatentRequest[VideoJob]):
    """A video on its way. `new_writer`: begins its file; None where nothing is written. `writer`
    has every frame of it encoded; `parallel`: over which ranks, None without.
    """

    new_writer: NewWriter | None = None
    writer: "VideoWriter | None" = None
    parallel: ParallelReport | None = None


@dataclass(frozen=True)
class VideoStages(LatentStages[LatentVideoModel, VideoRequest]):
    """A loaded video model's stages, over `ranks` where it has some."""

    ranks: VideoRanks | None = None

    def new_denoiser(self, works: Sequence[VideoRequest]) -> LatentDenoiser:
        if len(works) == 1:
            return super().new_denoiser(works)
        assert isinstance(self.model, ClipsModel), "it was asked how many clips it takes together"
        return self.model.denoiser_of([(one.job, one.embeddings) for one in works])

    def decode(
        self, work: VideoRequest, tiles: DecodeTiles | None = None, tiling: TileRule | None = None
    ) -> Events:
        """Decode the last latents into frames, which are encoded as they come: then it is done.
        `tiles`, and the `tiling` that they are: instead of the model's own.
        """
        assert work.latents is not None, "it is denoised"
        yield Progress(work.job.custom_id, "decode_latents")
        work.clock.enter("decode_latents")
        decoded = self.model.decode_latents(work.latents, tiling)
        writer = None if work.new_writer is None else work.new_writer(tiles)
        # Left in the middle it would go on keeping features of its frames.
        with closing(checked(work.job, decoded)) as pieces:
            if writer is None:
                deque(pieces, maxlen=0)
            else:
                work.clock.overlapped_s["write"] += _encode_beside(pieces, writer)
        work.clock.enter("queue")
        work.writer, work.parallel = writer, None if self.ranks is None else self.ranks.report()
        work.embeddings, work.latents = {}, None
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
        alike = group_by(jobs, lambda job: (job.model, job.size, job.num_frames, job.branch_count))
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

    def decode_anyhow(self, work: VideoRequest) -> Events:
        """The decode where memory may be short: once more without any rank's transformer on the
        device, the same pixels; then in smaller tiles. Each time the file begins anew.
        """
        assert work.latents is not None, "it is denoised"

        def drop() -> None:
            self.drop()
            self.model.release_transformer()
            if self.ranks is not None:
                self.ranks.release_branches()

        kept = "the text encoders, the transformer and the prefixes of pictures"
        memory = MemoryPolicy(drop, kept)
        tilings = iter(self.model.smaller_tilings(work.latents))

        def decode_smaller(work: VideoRequest, error: Exception) -> Events:
            is_short = isinstance(error, torch.OutOfMemoryError)
            tiles, tiling = next(tilings, (None, None)) if is_short else (None, None)
            if tiling is None:
                yield work.as_lost(error)
                return
            side = tiling.tile * self.model.card.pixels_per_cell
            note = f"continued in tiles of {side} pixels, which changes pixels near their borders"
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
        what = f"the model returned frames of shape {found}; expected {expected}"
        raise OutputError(what, code="output-video.shape")
    if len(levels) == 1:
        raise OutputError("every pixel of every frame is the same", code="output-video.constant")
