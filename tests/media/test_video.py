"""MP4 and PNG frames: what is written comes back, equal frames give equal files, whole or none."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import StorageError
from hyimg_cli.media import video
from hyimg_cli.media.metadata import Provenance, video_text
from hyimg_cli.media.video import Frames, write_video
from hyimg_cli.spec import digest


def scene(count: int, height: int, width: int) -> Frames:
    """A red square that moves over a soft gradient."""
    rows, columns = np.mgrid[0:height, 0:width]
    frames = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) // 2], -1)
    frames = np.repeat(frames[None], count, 0).astype(np.uint8)
    for index, frame in enumerate(frames):
        frame[4:20, 4 + 2 * index : 20 + 2 * index] = (220, 30, 30)
    return frames


def read_back(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


@pytest.mark.parametrize("size", [(64, 96), (63, 97), (17, 1), (480, 848)])
def test_frames_come_back(tmp_path: Path, size: tuple[int, int]) -> None:
    frames = scene(5, *size) if size[1] > 20 else np.full((5, *size, 3), 90, np.uint8)
    written = write_video(tmp_path / "a.mp4", [frames[:2], frames[2:]], fps=24)
    back = read_back(tmp_path / "a.mp4")
    assert back.shape == (5, size[0] + size[0] % 2, size[1] + size[1] % 2, 3)
    error = np.abs(back[:, : size[0], : size[1]].astype(int) - frames)
    assert error.mean() < 4
    assert (written.num_frames, written.height, written.width) == (5, *size)
    assert written.sha256 == digest.of_file(tmp_path / "a.mp4")
    assert written.pixel_sha256 == digest.of_bytes(frames.tobytes())


def test_colours_are_tagged_and_kept(tmp_path: Path) -> None:
    """Pure colours survive only where writer and reader agree on the matrix and the range."""
    colours = [(220, 30, 30), (30, 200, 40), (20, 40, 230), (255, 255, 255), (0, 0, 0)]
    frames = np.stack([np.full((32, 32, 3), colour, np.uint8) for colour in colours])
    write_video(tmp_path / "a.mp4", [frames], fps=1)
    means = read_back(tmp_path / "a.mp4").mean(axis=(1, 2))
    assert np.abs(means - np.array(colours)).max() < 4
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.pix_fmt, context.colorspace, context.color_range) == ("yuv420p", 1, 1)
        assert context.name == "h264"


def test_equal_frames_give_equal_files_however_they_come(tmp_path: Path) -> None:
    frames = scene(6, 64, 64)
    found = set()
    for size in ((64, 96), (63, 97), (480, 848), (32, 48)):
        # What another video leaves in memory must not shape the next one's file.
        write_video(tmp_path / "before.mp4", [scene(5, *size)], fps=24)
        for pieces in ([frames], iter(np.split(frames, 6))):
            found.add(write_video(tmp_path / "a.mp4", pieces, fps=8, comment="é"))
    assert len(found) == 1
    other = write_video(tmp_path / "c.mp4", [frames[::-1]], fps=8, comment="é")
    assert other.sha256 != found.pop().sha256


def test_rate_and_comment(tmp_path: Path) -> None:
    text = video_text(
        {"custom_id": "a", "prompt": "ein Hündchen 犬\n" * 400, "model": "film"},
        Provenance("1", "f"),
    )
    write_video(tmp_path / "a.mp4", [scene(2, 32, 32)], fps=30, comment=text)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata["comment"] == text
        assert container.streams.video[0].average_rate == 30


def test_png_frames_are_the_frames(tmp_path: Path) -> None:
    frames = scene(11, 33, 32)
    folder = tmp_path / "a.frames"
    folder.mkdir()
    (folder / "old.png").write_text("of an earlier run")
    write_video(tmp_path / "a.mp4", [frames], fps=8, frames_folder=folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{index:04d}.png" for index in range(11)]
    assert all(
        np.array_equal(np.asarray(Image.open(folder / name)), frame)
        for name, frame in zip(names, frames, strict=True)
    )


def broken(frames: Frames) -> Iterator[Frames]:
    yield frames
    raise RuntimeError("the decode failed")


@pytest.mark.parametrize(("pieces", "error"), [(broken, RuntimeError), (lambda _: [], ValueError)])
def test_nothing_is_left_where_frames_end_early(
    tmp_path: Path, pieces: Callable[[Frames], Iterator[Frames]], error: type[Exception]
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"before")
    with pytest.raises(error):
        write_video(
            tmp_path / "a.mp4", pieces(scene(3, 32, 32)), fps=8, frames_folder=tmp_path / "shots"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"before"


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """A limit on the size of files makes the system refuse to write, as a full disk does."""
    code = (
        "import resource, signal, sys, numpy as np; from pathlib import Path\n"
        "from hyimg_cli.errors import StorageError; from hyimg_cli.media.video import write_video\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"signal.signal({int(signal.SIGXFSZ)}, signal.SIG_IGN)\n"
        "noise = np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3), dtype=np.uint8)\n"
        "try: write_video(Path(sys.argv[1]), [noise], fps=8)\n"
        "except StorageError as error: print(error.code)"
    )
    path = tmp_path / "a.mp4"
    # -B: what it imports would be kept compiled, and cut off at that size for every other process.
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "storage.failed"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        write_video(tmp_path / "file" / "a.mp4", [scene(1, 32, 32)], fps=8)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageError), (errno.EIO, StorageError), (errno.EINVAL, av.FFmpegError)],
)
def test_only_the_disk_is_blamed_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuses(*_: object) -> None:
        av.error.err_check(-number)

    monkeypatch.setattr(video.VideoWriter, "_begin", refuses)
    with pytest.raises(kind):
        write_video(tmp_path / "a.mp4", [scene(1, 32, 32)], fps=8)
    assert not list(tmp_path.iterdir())
