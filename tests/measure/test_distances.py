"""Distances of pictures and videos are those of their pixels."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import MachineError, SourceImageError, UsageError
from hyimg_cli.measure.distances import (
    Measured,
    breaches,
    measured,
    summary,
    to_record,
)
from hyimg_cli.measure.pairs import Pair
from hyimg_cli.media.frames import read_frames
from hyimg_cli.quality.metrics import PIXEL_METRICS, Metric

CHOSEN = [PIXEL_METRICS["psnr"], PIXEL_METRICS["max_abs"]]


def flat(level: int, height: int = 16, width: int = 32) -> np.ndarray:
    return np.full((height, width, 3), level, dtype=np.uint8)


def write(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def clips(tmp_path: Path, write_video: Callable[..., Path]) -> tuple[Path, Path]:
    """Three frames; B is 0, 10 and 40 levels brighter."""
    a = write_video("a.mp4", [flat(100)] * 3)
    return a, write_video("b.mp4", [flat(100), flat(110), flat(140)])


def test_frames_come_back_in_order(write_video: Callable[..., Path]) -> None:
    path = write_video("a.mp4", [flat(0), flat(100), flat(200)])
    assert [frame[0, 0].tolist() for frame in read_frames(path)] == [[n] * 3 for n in (0, 100, 200)]


def test_a_video_is_turned_as_players_show_it(write_video: Callable[..., Path]) -> None:
    """A telephone that was held upright writes a matrix and leaves the frames as they are."""
    picture = np.zeros((16, 32, 3), np.uint8)
    picture[:8, :16] = 255
    path = write_video("a.mp4", [picture] * 2)
    turns = {(0, 1, 0, -1, 0, 0): (0, -1), (0, -1, 0, 1, 0, 0): (-1, 0)}
    turns[(-1, 0, 0, 0, -1, 0)] = (-1, -1)
    for matrix, corner in turns.items():
        data = bytearray(path.read_bytes())
        # After the type, the flags, five numbers and 16 bytes.
        at = data.index(b"tkhd") + 44
        data[at : at + 24] = struct.pack(">6i", *(one << 16 for one in matrix))
        path.write_bytes(data)
        frames = list(read_frames(path))
        assert frames[0].shape == ((16, 32, 3) if matrix[0] else (32, 16, 3))
        assert [int(frame[corner].mean()) > 200 for frame in frames] == [True, True]
        assert frames[0].mean() < 100


def test_a_video_has_mean_max_and_min(clips: tuple[Path, Path]) -> None:
    (found,) = measured([Pair("clip", *clips)], CHOSEN)
    assert found.frames == 3
    assert found.values["max_abs"] == [0, 10, 40]
    record = to_record(found, CHOSEN)
    assert (record["kind"], record["psnr_max"]) == ("video", "inf")
    levels = [record[f"max_abs{end}"] for end in ("", "_max", "_min")]
    assert levels == [50 / 3, 40, 0]
    assert record["psnr_min"] == pytest.approx(10 * math.log10(255**2 / 1600))
    assert record["psnr"] == pytest.approx(10 * math.log10(255**2 / ((0 + 100 + 1600) / 3)))


def test_folders_of_frames_are_as_good_as_a_video(tmp_path: Path, clips: tuple[Path, Path]) -> None:
    for side, path in zip("ab", clips, strict=True):
        for number, frame in enumerate(read_frames(path)):
            write(tmp_path / side / f"{number:03}.png", frame)
    (of_videos,) = measured([Pair("clip", *clips)], CHOSEN)
    (of_folders,) = measured([Pair("clip", tmp_path / "a", tmp_path / "b")], CHOSEN)
    assert of_folders.values == of_videos.values


@pytest.mark.parametrize("names", ["frame_{}.png", "{}.png", "take 3 ({}).PNG"])
def test_frames_of_a_folder_are_read_in_natural_order(tmp_path: Path, names: str) -> None:
    levels = range(1, 13)
    folders = tmp_path / "padded", tmp_path / "plain"
    for level in levels:
        write(folders[0] / f"{level:04}.png", flat(level))
        write(folders[1] / names.format(level), flat(level))
    for hidden in ("._1.png", ".DS_Store", ".1.png"):  # beside the frames on a disk of macOS
        (folders[1] / hidden).write_bytes(b"not a picture")
    (one,) = measured([Pair("x", *folders)], CHOSEN)
    assert [*one.values["max_abs"]] == [0] * 12


def test_videos_of_another_length_or_size_are_an_error(
    clips: tuple[Path, Path], write_video: Callable[..., Path], tmp_path: Path
) -> None:
    short, small = write_video("s.mp4", [flat(100)]), write_video("t.mp4", [flat(1, 16, 16)] * 3)
    with pytest.raises(UsageError, match="ends after 1 frames"):
        list(measured([Pair("clip", clips[0], short)], CHOSEN))
    with pytest.raises(UsageError, match="32x16 and 16x16"):
        list(measured([Pair("clip", clips[0], small)], CHOSEN))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no frames"):
        list(measured([Pair("clip", tmp_path / "empty", tmp_path / "empty")], CHOSEN))


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"not a video")
    with pytest.raises(UsageError, match=r"clip .*a\.mp4.*cannot be read: Invalid data"):
        list(measured([Pair("clip", tmp_path / "a.mp4", tmp_path / "a.mp4")], CHOSEN))


def test_a_list_of_other_files_is_no_video(clips: tuple[Path, Path], tmp_path: Path) -> None:
    """A list would have the decoder open what it names: a pipe, a device, an address."""
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {clips[0].name}\n")
    with pytest.raises(SourceImageError, match="the video cannot be read"):
        list(read_frames(tmp_path / "list.mp4"))


def test_all_pictures_of_two_sizes_are_named_before_any_is_measured(tmp_path: Path) -> None:
    good, other = write(tmp_path / "g.png", flat(1)), write(tmp_path / "o.png", flat(1, 8, 8))
    pairs = [Pair("same", good, good), Pair("one", good, other), Pair("two", other, good)]
    with pytest.raises(UsageError, match=r"2 of 3 .* one \(32x16 and 8x8\); two") as caught:
        next(measured(pairs, CHOSEN))
    assert caught.value.exit_code == 2


def test_a_metric_that_takes_more_memory_than_there_is_measures_nothing(
    tmp_path: Path, clips: tuple[Path, Path]
) -> None:
    Image.new("RGB", (1000, 1000)).save(tmp_path / "a.png")
    metric = Metric("wide", "", False, lambda a, b: pytest.fail("measured"), pixel_bytes=10**9)
    picture = Pair("one", tmp_path / "a.png", tmp_path / "a.png")
    for pair, size in ((picture, "1000x1000"), (Pair("two", *clips), "pixels")):
        with pytest.raises(MachineError, match=rf"wide of .*{size}.* takes about .* are free"):
            [*measured([pair], [PIXEL_METRICS["psnr"], metric])]


def test_what_reading_changed_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.png", flat(9))
    Image.new("RGBA", (32, 16), (9, 9, 9, 0)).save(tmp_path / "b.png")
    (found,) = measured([Pair("p", tmp_path / "a.png", tmp_path / "b.png")], CHOSEN)
    assert "transparency composited on white" in found.notes
    assert to_record(found, CHOSEN)["notes"] == list(found.notes)


def spread_of(name: str, **values: float) -> Measured:
    pair = Pair(name, Path("a.png"), Path("b.png"))
    return Measured(pair, {key: [value] for key, value in values.items()})


def test_gates_name_the_pairs_that_break_them() -> None:
    results = [
        spread_of("far", psnr=20.0, max_abs=90),
        spread_of("near", psnr=math.inf, max_abs=0),
        spread_of("edge", psnr=30.0, max_abs=7),
    ]
    texts = list(breaches(results, CHOSEN, {"psnr": 30, "max_abs": 7}))
    assert texts == ["far: psnr 20 is below 30", "far: max_abs 90 is above 7"]
    nothing = [spread_of("none", psnr=math.nan, max_abs=math.nan)]
    assert len(list(breaches(nothing, CHOSEN, {"psnr": 30}))) == 1


def test_a_video_is_held_to_its_worst_frame(clips: tuple[Path, Path]) -> None:
    results = list(measured([Pair("clip", *clips)], CHOSEN))
    assert not list(breaches(results, CHOSEN, {"max_abs": 40}))
    assert list(breaches(results, CHOSEN, {"max_abs": 39}))
    assert list(breaches(results, CHOSEN, {"psnr": 17}))


def test_the_summary_has_mean_and_worst() -> None:
    results = [spread_of("x", psnr=math.inf, max_abs=0), spread_of("y", psnr=20.0, max_abs=8)]
    found = summary(results, CHOSEN)
    assert found["psnr"]["worst"] == 20.0
    assert found["psnr"]["mean"] == pytest.approx(20 + 10 * math.log10(2))
    assert found["max_abs"] == {"mean": 4.0, "worst": 8}
