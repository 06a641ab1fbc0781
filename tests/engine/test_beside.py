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
from hyimg_cli.spec.job import View


@pytest.fixture
def views(tmp_path: Path) -> list[View]:
    made = []
    for level in range(5):
        made.append(View(str(tmp_path / f"{level}.png")))
        Image.new("RGB", (8, 8), (40 * level,) * 3).save(made[-1].path)
    return made


def test_gives_each_image_as_asked(views: list[View]) -> None:
    order = [*views, views[0], views[3]]
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque(order), window=2)
        for view in order:
            image, beside_s = ahead.read(view)
            assert np.array_equal(image.pixels, np.asarray(Image.open(view.path)))
            assert beside_s >= 0


def test_an_unexpected_view_is_read_at_once(views: list[View]) -> None:
    with ThreadPoolExecutor(1) as pool:
        image, beside_s = SourcePrefetch(pool, deque(views[:2]), window=2).read(views[4])
    assert beside_s == 0.0
    assert image.pixels[0, 0, 0] == 160


def test_a_bad_image_is_its_own_fault_alone(views: list[View], tmp_path: Path) -> None:
    bad = View(str(tmp_path / "missing.png"))
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque([bad, views[1]]), window=4)
        with pytest.raises(SourceImageError):
            ahead.read(bad)
        assert ahead.read(views[1])[0].pixels[0, 0, 0] == 40


def test_reads_the_next_while_this_one_is_used(
    views: list[View], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {view: threading.Event() for view in views}
    original = beside.read_view

    def noted(view: View) -> SourceImage:
        started[view].set()
        return original(view)

    monkeypatch.setattr(beside, "read_view", noted)
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque(views), window=2)
        ahead.read(views[0])
        assert started[views[1]].wait(timeout=60)
        assert not started[views[3]].is_set()


def test_what_a_failed_job_would_have_read_does_not_stop_reading_ahead(
    views: list[View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: set[View] = set()
    original = beside.read_view

    def noted(view: View) -> SourceImage:
        began.add(view)
        return original(view)

    monkeypatch.setattr(beside, "read_view", noted)
    bad = View(str(tmp_path / "missing.png"))
    with ThreadPoolExecutor(1) as pool:
        ahead = SourcePrefetch(pool, deque([bad, *views]), window=2)
        with pytest.raises(SourceImageError):
            ahead.read(bad)
        # The job of the bad one asks for views[0] no more.
        for number in range(1, 5):
            assert ahead.read(views[number])[0].pixels[0, 0, 0] == 40 * number
            pool.submit(lambda: None).result()
            wanted = set(views[number : number + 2])
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
