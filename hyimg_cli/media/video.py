"""Videos as files: frames into H.264 in an MP4, and optionally into lossless PNG files.

Frames are uint8 arrays [T, H, W, 3], RGB, in pieces of any length; at most one piece is held.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import Image

from hyimg_cli.files import is_of_the_disk, replacing, storage_error
from hyimg_cli.spec import digest

Frames = NDArray[np.uint8]
# Visually lossless, and fast enough for any model.
_CRF, _PRESET = "17", "medium"
# NOTE: x264 splits its work by the number of threads, so another number gives another file.
_THREADS = 4
# NOTE: x264's macroblock tree reads uninitialised memory: equal small frames gave four different
# files in one process. Without it, or without its assembly, they give one file.
_STEADY = "mbtree=0"
_BT709 = 1


@dataclass(frozen=True)
class WrittenVideo:
    """Digests of the file and of its frames' raw bytes before compression, and its contents."""

    sha256: str
    pixel_sha256: str
    num_frames: int
    height: int
    width: int


def write_video(path: Path, pieces: Iterable[Frames], **how: Any) -> WrittenVideo:
    """Write an MP4 of all `pieces`; `how` and errors: as for `VideoWriter`."""
    with closing(VideoWriter(path, **how)) as writer:
        for piece in pieces:
            writer.add(piece)
        return writer.finish()


class VideoWriter:
    """An MP4 that is written piece by piece, and PNG files of its frames in `frames_folder`.

    All files are complete once `finish` returns, the PNG files before the MP4; `close` drops
    unfinished ones. Equal frames give equal bytes with the same libraries. H.264 halves the
    resolution of colours, so an odd side repeats its last row or column. All methods raise
    StorageError for errors of the disk, and the encoder's own errors as they are.
    """

    def __init__(
        self,
        path: Path,
        *,
        fps: int,
        comment: str | None = None,
        box: bytes = b"",
        frames_folder: Path | None = None,
    ) -> None:
        """`box` is appended to the MP4 as it is."""
        self.path, self.comment, self.frames_folder = path, comment, frames_folder
        self._fps, self._box, self._count, self._pixels = fps, box, 0, hashlib.sha256()
        # The version of the muxer stays out of the file.
        options = {"fflags": "+bitexact", "movflags": "+faststart"}
        with _disk_errors(path), ExitStack() as places:
            self._mp4 = places.enter_context(replacing(path))
            self._frames = places.enter_context(replacing(frames_folder)) if frames_folder else None
            if self._frames:
                self._frames.mkdir()
            container = av.open(str(self._mp4), "w", format="mp4", options=options)
            self._container = places.enter_context(container)
            if comment is not None:
                container.metadata["comment"] = comment
            self._places = places.pop_all()

    def add(self, piece: Frames) -> None:
        """Encode frames, and write each as a PNG file if a folder is given."""
        with _disk_errors(self.path):
            for frame in piece:
                if not self._count:
                    self._begin(*frame.shape)
                assert frame.shape == self._shape, "a video's frames are of one size"
                assert frame.dtype == np.uint8, "frames are bytes"
                self._pixels.update(np.ascontiguousarray(frame).tobytes())
                self._container.mux(self._stream.encode(self._picture(frame)))
                if self._frames is not None:
                    Image.fromarray(frame).save(self._frames / f"{self._count:04d}.png")
                self._count += 1

    def finish(self) -> WrittenVideo:
        """Put everything in its place. Raises ValueError if there were no frames."""
        with _disk_errors(self.path):
            self._end_stream()
            with open(self._mp4, "ab") as file:
                file.write(self._box)
            sha256, pixel_sha256 = digest.of_file(self._mp4), self._pixels.hexdigest()
            self._places.close()
        return WrittenVideo(sha256, pixel_sha256, self._count, *self._shape[:2])

    def close(self) -> None:
        """Drop unfinished files."""
        with suppress(_Unfinished), _disk_errors(self.path), self._places:
            raise _Unfinished

    def _begin(self, height: int, width: int, channels: int) -> None:
        self._shape = height, width, channels
        self._stream = stream = self._container.add_stream("libx264", rate=self._fps)
        stream.height, stream.width = height + height % 2, width + width % 2
        stream.pix_fmt = "yuv420p"
        stream.options = {
            "crf": _CRF, "preset": _PRESET, "flags": "+bitexact", "x264-params": _STEADY,
        }  # fmt: skip
        context = stream.codec_context
        context.thread_count = _THREADS
        # Players must not have to guess how RGB became luma and chroma.
        context.color_range = ColorRange.MPEG
        context.colorspace = Colorspace.ITU709
        context.color_primaries = context.color_trc = _BT709

    def _end_stream(self) -> None:
        if not self._count:
            raise ValueError("a video needs at least one frame")
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def _picture(self, frame: Frames) -> VideoFrame:
        height, width, _ = frame.shape
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        rgb = VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        return rgb.reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
        )


class _Unfinished(Exception):
    """Raised and caught in `VideoWriter.close`, so that unfinished files are removed."""


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise StorageError for errors of the disk; the encoder's own errors pass."""
    try:
        yield
    except OSError as error:
        if not is_of_the_disk(error.errno):
            raise
        raise storage_error(error, path.parent) from error
