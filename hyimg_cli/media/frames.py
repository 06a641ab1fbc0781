"""Frames of a video file, one at a time, in display order.

Pixels are uint8 arrays [H, W, 3], RGB, turned as the container says and players show them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hyimg_cli.errors import SourceImageError, require
from hyimg_cli.files import opened
from hyimg_cli.media.source_files import file_faults

if TYPE_CHECKING:
    from av.container import InputContainer

# NOTE: a file may be a list of other files to play (ffconcat, HLS); none of them is opened.
_ALONE = {"protocol_whitelist": ""}
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


def read_frames(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield every frame of the first video stream. Raises as `open_video`."""
    with open_video(path) as container:
        for frame in container.decode(video=0):
            pixels = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
            # Degrees against the clock; -90 for a telephone that was held upright.
            yield np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


@contextmanager
def open_video(path: Path, **options: str) -> Iterator["InputContainer"]:
    """Open a file with a video stream for reading in a block; `options`: the container's.

    Raises SourceImageError, also for errors while reading; MachineError without av.
    """
    require("av")
    import av

    with file_faults(path):
        file = opened(path)
    try:
        with file, av.open(file, "r", options=_ALONE | options) as container:
            if not container.streams.video:
                raise ValueError("no frames")
            yield container
    # A file with a wrong type can end in many kinds of errors.
    except (av.error.FFmpegError, OSError, ValueError) as error:
        # The library's message begins with its own number of the error.
        what = f"the video cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = "copy it again, or give an MP4 or a folder of frames"
        raise SourceImageError(what, where=path, hint=hint, code="source.not-a-video") from error
