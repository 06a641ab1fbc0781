"""Frames of a video file, one at a time, in the order they are shown.

Pixels are uint8 arrays [H, W, 3], RGB. A turn that the container asks for is not applied.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyimg_cli.errors import SourceImageError, require
from hyimg_cli.files import opened

# NOTE: a file may be a list of other files to play (ffconcat, HLS); none of them is opened.
ALONE = {"protocol_whitelist": ""}
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


def read_frames(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Every frame of the first video stream. Raises SourceImageError, at the frame it happens;
    MachineError without av.
    """
    require("av")
    import av

    try:
        with opened(path) as file, av.open(file, "r", options=ALONE) as container:
            if not container.streams.video:
                raise _fault("it has no pictures in it", path)
            for frame in container.decode(video=0):
                yield np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
    except FileNotFoundError:
        raise _fault("there is no such file", path, slug="missing") from None
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise _fault(f"the video cannot be read: {error}", path) from error


def _fault(what: str, path: Path, *, slug: str = "not-a-video") -> SourceImageError:
    return SourceImageError(what, where=path, code=f"source.{slug}")
