"""A video's frames on their way to its file.

A video is encoded while it is decoded; no more than two pieces of its frames are held:

    decode    piece 1 ▸ piece 2 ▸ piece 3 ▸ ..         in the run's own thread
    encode              piece 1 ▸ piece 2 ▸ ..         in another; the decode waits for it
    write                                   tail ▸ name, while the next job is denoised
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hyimg_cli.errors import OutputError
from hyimg_cli.pipelines.latent.stages import LatentRequest
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.spec.events import ParallelReport
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.media.video import VideoWriter


@dataclass(eq=False)
class VideoRequest(LatentRequest[VideoJob]):
    """A video on its way. `writer` has every frame of its file encoded; `parallel`: over which
    ranks, None without.
    """

    writer: "VideoWriter | None" = None
    parallel: ParallelReport | None = None


def encode_beside(pieces: Iterator[np.ndarray], writer: "VideoWriter") -> float:
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
