"""Videos as files: frames into H.264 in an MP4, and beside it into PNG files without loss.

Frames are uint8 arrays [T, H, W, 3], RGB, in pieces of any length; no more than a piece is held.
"""

import hashlib
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import Image

from hyimg_cli.errors import StorageError
from hyimg_cli.files import is_of_the_disk, replacing, storage_error
from hyimg_cli.spec import digest

Frames = NDArray[np.uint8]
# Visually without loss, at a speed that keeps up with any model.
_CRF, _PRESET = "17", "medium"
# NOTE: x264 cuts its work by the number of threads, so another number gives another file.
_THREADS = 4
# NOTE: x264's macroblock tree reads memory that it never wrote: equal small frames gave four
# different files in one process. Without it, or without its assembly, they give one.
_STEADY = "mbtree=0"
_BT709 = 1


@dataclass(frozen=True)
class WrittenVideo:
    """Digests of the file and of its frames' raw bytes before compression, and what it holds."""

    sha256: str
    pixel_sha256: str
    num_frames: int
    height: int
    width: int


# Takes pieces, and None behind the last one.
Film: TypeAlias = Generator[None, Frames | None, WrittenVideo]


def write_video(path: Path, pieces: Iterable[Frames], **how: Any) -> WrittenVideo:
    """Writes an MP4 of all `pieces`, as `film` does with the same options."""
    with closing(film(path, **how)) as made:
        for piece in pieces:
            made.send(piece)
        return finished(made)


def film(
    path: Path,
    *,
    fps: int,
    comment: str | None = None,
    box: bytes = b"",
    frames_folder: Path | None = None,
) -> Film:
    """An MP4 in the making, and PNG files in `frames_folder`: `send` takes a piece, `finished` puts
    both in their places, and `close` drops what is not finished. `box` is appended as it is.

    Each is there whole or not at all. Equal frames give equal bytes with the same libraries. H.264
    halves the colours' resolution, so an odd side gets its last row or column twice. The PNG files
    stand before the MP4 does. All raise StorageError for what the disk refuses, the encoder's own
    errors as they are, ValueError where there is no frame.
    """
    made = _encode_pieces(path, fps, comment, box, frames_folder)
    next(made)
    return made


def finished(made: Film) -> WrittenVideo:
    """The film in its place."""
    try:
        made.send(None)
    except StopIteration as end:
        written: WrittenVideo = end.value
        return written
    raise AssertionError("no piece comes behind the last")


def _encode_pieces(
    path: Path, fps: int, comment: str | None, box: bytes, frames_folder: Path | None
) -> Film:
    """Take pieces until None."""
    # What a muxer of another version would name itself stays out of the file.
    options = {"fflags": "+bitexact", "movflags": "+faststart"}
    try:
        frames_place = replacing(frames_folder) if frames_folder else nullcontext()
        with replacing(path) as film_path, frames_place as shots:
            if shots:
                shots.mkdir()
            with av.open(str(film_path), "w", format="mp4", options=options) as container:
                if comment is not None:
                    container.metadata["comment"] = comment
                stream = _Stream(container, fps, shots)
                while (piece := (yield)) is not None:
                    stream.add(piece)
                    del piece  # not held until the next one comes
                stream.close()
            with open(film_path, "ab") as file:
                file.write(box)
            sha256, pixel_sha256 = digest.of_file(film_path), stream.pixels.hexdigest()
            return WrittenVideo(sha256, pixel_sha256, stream.count, *stream.shape[:2])
    except StorageError:
        raise
    except (OSError, av.FFmpegError) as error:
        if not is_of_the_disk(error.errno):
            raise
        refusal = error if isinstance(error, OSError) else OSError(error.errno, error.strerror)
        raise storage_error(refusal, path.parent) from error


class _Stream:
    """The video stream of a container, begun with its first frame: what it was given until now."""

    def __init__(
        self, container: av.container.OutputContainer, fps: int, shots: Path | None
    ) -> None:
        self.pixels, self.count, self.shape = hashlib.sha256(), 0, (0, 0, 0)
        self._container, self._fps, self._shots = container, fps, shots
        self._odd = _EVEN

    def add(self, piece: Frames) -> None:
        """Encode its frames, and write each as a picture where there is a place for them."""
        for frame in piece:
            if not self.count:
                self._begin(*frame.shape)
            assert frame.shape == self.shape, "a video's frames are of one size"
            assert frame.dtype == np.uint8, "frames are bytes"
            self.pixels.update(np.ascontiguousarray(frame).tobytes())
            self._container.mux(self._stream.encode(self._picture(frame)))
            if self._shots is not None:
                Image.fromarray(frame).save(self._shots / f"{self.count:04d}.png")
            self.count += 1

    def close(self) -> None:
        """Encode what was held back. Raises ValueError where there was no frame."""
        if not self.count:
            raise ValueError("a video needs a frame")
        self._container.mux(self._stream.encode(None))

    def _begin(self, height: int, width: int, channels: int) -> None:
        self.shape = height, width, channels
        self._odd = ((0, height % 2), (0, width % 2), (0, 0))
        self._stream = stream = self._container.add_stream("libx264", rate=self._fps)
        stream.height, stream.width = height + height % 2, width + width % 2
        stream.pix_fmt = "yuv420p"
        stream.options = {
            "crf": _CRF, "preset": _PRESET, "flags": "+bitexact", "x264-params": _STEADY,
        }  # fmt: skip
        context = stream.codec_context
        context.thread_count = _THREADS
        # A player must not guess how colours were turned into luma and chroma.
        context.color_range = ColorRange.MPEG
        context.colorspace = Colorspace.ITU709
        context.color_primaries = context.color_trc = _BT709

    def _picture(self, frame: Frames) -> VideoFrame:
        even = np.pad(frame, self._odd, mode="edge") if self._odd != _EVEN else frame
        rgb = VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
        return rgb.reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
        )


_EVEN = ((0, 0), (0, 0), (0, 0))
