"""The video pipeline, and the writing of video files.

A video is encoded while it is decoded; at most two pieces of its frames are in memory:

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hyimg_cli.cache.disk import START_PICTURES
from hyimg_cli.errors import OutputError
from hyimg_cli.files import remove, replace_file, storage_error
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import file_provenance
from hyimg_cli.manifest.planner import group_by
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.media.metadata import video_text
from hyimg_cli.media.xmp import EDITED, MADE, mp4_box
from hyimg_cli.models import registry
from hyimg_cli.models.latent import LatentDenoiser
from hyimg_cli.models.latent_video import ClipsModel, LatentVideoModel
from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.latent.pipeline import Events, LatentPipeline, LatentRequest
from hyimg_cli.pipelines.out_of_memory import Attempt, MemoryPolicy
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.queue import Ticket
from hyimg_cli.pipelines.ranks import VideoRanks
from hyimg_cli.settings.run import DecodeTiles, ModelChoice, RunConfig
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.events import ParallelReport, Prewarmed, Progress, ReuseReport, VideoFile
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter

# Minimum number of videos of a shape for which a step beforehand is worthwhile.
_FEWEST = 3


@dataclass(eq=False)
class VideoRequest(LatentRequest[VideoJob]):
    """A video at work.

    `writer` has encoded every frame of its file. `parallel`: how the job was spread over ranks;
    None without ranks.
    """

    writer: "VideoWriter | None" = None
    parallel: ParallelReport | None = None


class VideoPipeline(LatentPipeline[LatentVideoModel, VideoJob, VideoRequest]):
    """Makes videos one at a time, except for clips that are denoised together."""

    request_kind = VideoRequest

    def __init__(self, config: RunConfig, forget_pictures: Callable[[], object] = int) -> None:
        """`forget_pictures` drops what pictures keep on the same device for later ones."""
        super().__init__(config, START_PICTURES)
        self._ranks: VideoRanks | None = None
        self._forget_pictures = forget_pictures

    def _open(self, choice: ModelChoice) -> LatentVideoModel:
        opened, parallel = registry.load_video(choice), self._config.parallel
        if parallel.ranks > 1:
            self._ranks = VideoRanks(opened, choice, parallel)
        return opened

    def _load(self, *, with_transformer: bool) -> None:
        if self._ranks is not None:
            self._ranks.load(with_branches=with_transformer)
        super()._load(with_transformer=with_transformer)

    def _parts(self, tickets: Sequence[Ticket]) -> list[list[Ticket]]:
        """Return groups of clips of one size, length and schedule, to denoise together."""
        most = self._config.batch.clips if isinstance(self._resident(), ClipsModel) else 1
        alike = group_by(tickets, lambda ticket: cast(VideoJob, ticket.job).flow_shift)
        return [same[n : n + most] for same in alike.values() for n in range(0, len(same), most)]

    def new_denoiser(self, works: Sequence[VideoRequest]) -> LatentDenoiser:
        if len(works) == 1:
            return super().new_denoiser(works)
        model = self._resident()
        assert isinstance(model, ClipsModel), "it was asked how many clips it takes together"
        return model.denoiser_of([(one.job, one.embeddings) for one in works])

    def decode(
        self, work: VideoRequest, tiles: DecodeTiles | None = None, tiling: TileRule | None = None
    ) -> Events[VideoRequest]:
        """Decode the last latents into frames, encode them, and yield the finished job.

        `tiles`, and the matching `tiling`, are used instead of the model's own.
        """
        assert work.latents is not None, "it is denoised"
        yield Progress(work.job.custom_id, "decode_latents")
        work.clock.enter("decode_latents")
        decoded = self._resident().decode_latents(work.latents, tiling)
        writer = None
        if work.folder is not None:
            writer = self._new_writer(work.job, work.folder, tiles)
        # Closed explicitly: a decode that stops midway would keep features of its frames.
        with closing(checked(work.job, decoded)) as pieces:
            if writer is None:
                deque(pieces, maxlen=0)
            else:
                work.clock.overlapped_s["write"] += _encode_beside(pieces, writer)
        work.clock.enter("queue")
        work.writer, work.parallel = writer, None if self._ranks is None else self._ranks.report()
        work.embeddings, work.latents = {}, None
        yield work

    def _prewarm(self, jobs: Sequence[VideoJob], folder: JobFolder | None) -> Prewarmed:
        """Run one denoise step of every new shape that several jobs have.

        Its latents are not kept, and every random draw has its own generator.

        Nothing is decoded. That would cost as much as a job's own decode, and the next denoise step
        would undo its only gain, the allocator's blocks. A shape of one or two jobs is left out,
        because the step would cost more than it saves. A shape whose stand-in fails is not counted.
        """
        left = self._not_denoised(jobs, folder)
        # Everything that a job's forwards depend on, except the length of its text.
        alike = group_by(left, lambda job: (job.model, job.size, job.num_frames, job.branch_count))
        ran = 0
        for shape, same in alike.items():
            if len(same) < _FEWEST or shape in self._warmed:
                continue
            self._warmed.add(shape)
            stand_in = replace(same[0], custom_id="prewarm", num_inference_steps=1)
            with Attempt() as tried:
                clock, digests = PhaseClock(0.0, lambda: None), self._digests(stand_in)
                work = VideoRequest(stand_in, clock, source_digests=digests)
                deque(chain(self.encode(work, is_counted=False), self.denoise(work)), maxlen=0)
            if tried.error is None:
                ran += 1
            else:
                self._tell_lost(tried.error)
        return Prewarmed(ran, 0.0)

    def drop(self) -> None:
        super().drop()
        self._forget_pictures()

    def decode_anyhow(self, work: VideoRequest) -> Events[VideoRequest]:
        """Decode, with remedies if memory is short.

        The first is a retry without any rank's transformer on the device, with the same pixels. The
        next ones are smaller tiles. Each attempt begins the file again.
        """
        assert work.latents is not None, "it is denoised"
        model = self._resident()

        def drop() -> None:
            self.drop()
            model.unload_transformer()
            if self._ranks is not None:
                self._ranks.release_branches()

        kept = "the text encoders, the transformer and the prefixes of pictures"
        memory = MemoryPolicy(drop, kept)
        tilings = iter(model.smaller_tilings(work.latents))

        def decode_smaller(work: VideoRequest, error: Exception) -> Events[VideoRequest]:
            is_short = isinstance(error, torch.OutOfMemoryError)
            tiles, tiling = next(tilings, (None, None)) if is_short else (None, None)
            if tiling is None:
                yield work.as_lost(error)
                return
            side = tiling.tile * model.card.pixels_per_cell
            note = f"continued in tiles of {side} pixels, which changes pixels near their borders"
            memory.note([work], f"out of memory in the decode; {note}")
            smaller = partial(self.decode, tiles=tiles, tiling=tiling)
            yield from memory.attempt([work], smaller, decode_smaller)

        yield from memory.attempt([work], self.decode, decode_smaller)

    def write(self, done: VideoRequest, folder: JobFolder) -> Sequence[VideoFile]:
        """Write the sidecar, the frames, then the video, so that a visible video is complete."""
        job, writer = done.job, done.writer
        assert writer is not None, "where there is a folder there is a file"
        path, frames = writer.path, writer.frames_folder
        with closing(writer):
            try:
                # An earlier video of this name may have left these; they describe another job.
                for suffix in (".json", ".frames"):
                    remove(path.with_suffix(suffix))
                if writer.comment is not None:
                    replace_file(path.with_suffix(".json"), f"{writer.comment}\n".encode())
            except OSError as error:
                raise storage_error(error, path.parent) from error
            written = writer.finish()
        file = VideoFile(
            path=path.relative_to(folder.folder).as_posix(),
            sha256=written.sha256,
            pixel_sha256=written.pixel_sha256,
            width=written.width,
            height=written.height,
            seed=job.seed,
            num_frames=written.num_frames,
            fps=job.fps,
            frames_path=frames.relative_to(folder.folder).as_posix() if frames else None,
        )
        return (file,)

    def _new_writer(
        self, job: VideoJob, folder: JobFolder, tiles: DecodeTiles | None
    ) -> "VideoWriter":
        """Begin the job's file under a temporary name.

        `tiles`: the tiles of its decode, if they differ from the configured ones.
        """
        # Imported here: a run of pictures needs no PyAV.
        from hyimg_cli.media.video import VideoWriter

        config, path = self._config, folder.place_for(job, ".mp4")
        frames = path.with_suffix(".frames") if config.output.frames == "png" else None
        text, box = None, b""
        if config.output.metadata:
            if tiles is not None:
                config = replace(config, model=replace(config.model, decode_tiles=tiles))
            made_by = file_provenance(job, config)
            sources = [one.sha256 for one in self._digests(job)]
            text = video_text(public_line(job), made_by, sources)
            box = mp4_box(EDITED if job.images else MADE)
        return VideoWriter(path, fps=job.fps, comment=text, box=box, frames_folder=frames)

    def line_fields(self, done: VideoRequest) -> dict[str, Any]:
        reason = f"{done.job.task} has no text stage"
        return {
            "kv_reuse": ReuseReport("none", 0, 0, 0, (), reason=reason),
            "batch": {"denoise": done.together},
            "sigmas": self._resident().sigmas(done.job) if done.job.scheduler else None,
            "parallel": done.parallel,
        }


def _encode_beside(pieces: Iterator[np.ndarray], writer: "VideoWriter") -> float:
    """Encode each piece while the next one is decoded; return the seconds that encoding took.

    If either fails, no part of the file remains.
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
    """Yield `pieces` as they come.

    Raises OutputError if they are not the video that the job asked for, or show nothing.
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
