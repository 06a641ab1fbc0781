"""Reading ahead and writing later: order, faults, and the time that overlaps with the model."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import SourceImage
from hyimg_cli.pipelines import prefetch as beside
from hyimg_cli.pipelines.prefetch import SourcePrefetch, WriteBehind


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = []
    for level in range(5):
        made.append(str(tmp_path / f"{level}.png"))
        Image.new("RGB", (8, 8), (40 * level,) * 3).save(made[-1])
    return made


def test_gives_each_image_as_asked(paths: list[str]) -> None:
    order = [*paths, paths[0], paths[3]]
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque(order), window=2)
        for path in order:
            image, beside_s = ahead.read(path)
            assert np.array_equal(image.pixels, np.asarray(Image.open(path)))
            assert beside_s >= 0


def test_an_unexpected_path_is_read_at_once(paths: list[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        image, beside_s = SourcePrefetch(pool, deque(paths[:2]), window=2).read(paths[4])
    assert beside_s == 0.0
    assert image.pixels[0, 0, 0] == 160


def test_a_bad_image_is_its_own_fault_alone(paths: list[str], tmp_path: Path) -> None:
    bad = str(tmp_path / "missing.png")
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque([bad, paths[1]]), window=4)
        with pytest.raises(SourceImageError):
            ahead.read(bad)
        assert ahead.read(paths[1])[0].pixels[0, 0, 0] == 40


def test_reads_the_next_while_this_one_is_used(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {path: threading.Event() for path in paths}
    original = beside.read_image

    def noted(path: Path) -> SourceImage:
        started[str(path)].set()
        return original(path)

    monkeypatch.setattr(beside, "read_image", noted)
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque(paths), window=2)
        ahead.read(paths[0])
        assert started[paths[1]].wait(timeout=60)
        assert not started[paths[3]].is_set()


def test_what_a_failed_job_would_have_read_does_not_stop_reading_ahead(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: set[str] = set()
    original = beside.read_image

    def noted(path: Path) -> SourceImage:
        began.add(str(path))
        return original(path)

    monkeypatch.setattr(beside, "read_image", noted)
    bad = str(tmp_path / "missing.png")
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque([bad, *paths]), window=2)
        with pytest.raises(SourceImageError):
            ahead.read(bad)
        # The job of the bad one asks for paths[0] no more.
        for number in range(1, 5):
            assert ahead.read(paths[number])[0].pixels[0, 0, 0] == 40 * number
            pool.submit(lambda: None).result()
            wanted = set(paths[number : number + 2])
            assert wanted <= began, f"nothing was read beside image {number}"


def test_writes_come_back_in_order_and_once() -> None:
    with ThreadPoolExecutor(1) as pool:
        behind: WriteBehind[int] = WriteBehind(pool)
        for number in range(5):
            behind.submit(lambda n=number: n)
        assert [value for value, _ in behind.finished(wait=True)] == list(range(5))
        assert list(behind.finished(wait=True)) == []


def test_does_not_wait_unless_told() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        behind: WriteBehind[bool] = WriteBehind(pool)
        behind.submit(lambda: release.wait(60))
        assert list(behind.finished(wait=False)) == [], "who waited would have it"
        release.set()
        assert [value for value, _ in behind.finished(wait=True)] == [True]


def test_a_failed_write_is_raised_where_it_is_collected() -> None:
    def full() -> int:
        raise OSError(28, "no space")

    with ThreadPoolExecutor(1) as pool:
        behind: WriteBehind[int] = WriteBehind(pool)
        behind.submit(full)
        with pytest.raises(OSError, match="no space"):
            list(behind.finished(wait=True))
