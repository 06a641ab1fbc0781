"""A page that follows a run pauses after each refresh, and begins with the first picture."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report.folders import asked, done, write_run
from report.test_run_page import index, large, records

from hyimg_cli.report import run_page, thumbnails
from hyimg_cli.report.run_page import PAUSE, LivePage
from hyimg_cli.report.thumbnails import small
from hyimg_cli.spec.events import JobEnded, Outcome, Progress

DONE = JobEnded(Outcome("a", "done", key=""))
OTHER = Progress("a", "think", 1)


def journaled(out: Path, name: str) -> None:
    with open(out / "results.jsonl", "a") as journal:
        journal.write(json.dumps(done(name)) + "\n")


class Clock:
    """Time that passes only where it is told to: of the run, and of the page's own work."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.run_s = self.work_s = 0.0
        patch.setattr(run_page.time, "perf_counter", lambda: self.run_s)
        patch.setattr(run_page.time, "thread_time", lambda: self.work_s)


def settled(page: LivePage) -> None:
    page._thread.submit(int).result()


def test_a_page_pauses_for_many_times_as_long_as_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refresh works for 0.25 s; a job is done each second, for an hour."""
    clock, refreshed = Clock(monkeypatch), []

    class Page:
        is_waiting = False

        def __init__(self, folder: Path) -> None:
            pass

        def refresh(self, **how: Any) -> bool:
            refreshed.append((clock.run_s, how["is_running"]))
            clock.work_s += 0.25
            return True

    monkeypatch.setattr(run_page, "RunPage", Page)
    page = LivePage(tmp_path)
    page.look(OTHER)
    settled(page)
    for second in range(1, 3601):
        clock.run_s = second
        page.look(DONE)
        settled(page)
    assert page.close()
    assert refreshed[0] == (0.0, True)
    assert refreshed[1] == (1, True), "the first picture is shown at once"
    assert refreshed[-1] == (3600, False)
    times = [time for time, _ in refreshed]
    assert times[1:-1] == [*range(1, 3600, PAUSE // 4)]


def test_thumbnails_are_made_on_the_way(tmp_path: Path) -> None:
    out = large(tmp_path / "out")
    page = LivePage(out)
    page.look(DONE)
    settled(page)
    assert index(out)["files"] == [[1, 0]]
    assert "thumb" in records(out)[0]["outputs"][0]
    assert not page.close() or not index(out)["running"]


def test_looking_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs holds up the page, not the run."""
    out, looked = write_run(tmp_path / "out", [], [asked("a")]), threading.Event()
    whole, seen = run_page.RunPage.refresh, []

    def slow(self: Any, **how: Any) -> bool:
        seen.append(looked.wait(60))
        return bool(whole(self, **how))

    monkeypatch.setattr(run_page.RunPage, "refresh", slow)
    page = LivePage(out)
    for _ in range(100):
        page.look(DONE)
    looked.set()
    journaled(out, "a")
    page.close()
    assert all(seen), "a look waited for the refresh"
    assert [one["id"] for one in records(out)] == ["a"]


def test_what_failed_on_the_way_is_made_good_at_the_end(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", [], [asked("a")])
    (out / "report").write_text("in the way")
    page = LivePage(out)
    page.look(DONE)
    settled(page)
    (out / "report").unlink()
    journaled(out, "a")
    page.look(DONE)
    assert page.close()
    assert [one["id"] for one in records(out)] == ["a"]


def _page_times(out: Path) -> dict[str, int]:
    pages = [out / "report.html", *(out / "report").glob("*.js")]
    return {path.name: path.stat().st_mtime_ns for path in pages}


def _finished(out: Path) -> Path:
    """A run whose page is written; its small picture is shown as it is."""
    write_run(out, [done("a")], [asked("a")])
    Image.new("RGB", (8, 8)).save(out / "outputs" / "a.png")
    LivePage(out).close()
    return out


def _append(path: Path) -> None:
    path.write_text(path.read_text() + json.dumps(done("b")) + "\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "result": lambda out: _append(out / "results.jsonl"),
    "result of a shard": lambda out: (out / "results-0001.jsonl").write_text(""),
    "settings": lambda out: (out / "run.json").write_text("{}"),
    "job": lambda out: (out / "manifest.resolved.jsonl").write_text(json.dumps(asked("c")) + "\n"),
    "page": lambda out: (out / "report.html").unlink(),
    "data": lambda out: (out / "report" / "data-0001.js").write_text("damaged"),
    "output": lambda out: (out / "outputs" / "a.png").unlink(),
    "thumbnails": lambda out: (out / "report" / "thumbs").mkdir(),
    "drafts": lambda out: _finished(out / "drafts"),
    "state": lambda out: (out / "report" / "state").write_bytes(b"\xff"),
    "no state": lambda out: (out / "report" / "state").unlink(),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_page_is_made_again_if_what_it_shows_has_changed(
    tmp_path: Path, change: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without any work left, which may have written its jobs and settings again."""
    out = _finished(tmp_path / "out")
    before = _page_times(out)
    for name in ("results.jsonl", "manifest.resolved.jsonl"):
        (out / name).touch()
    if change is not None:
        CHANGES[change](out)
    caplog.clear()
    caplog.set_level("INFO")
    changed = LivePage(out).close()
    assert ("the page took" in caplog.text) == (change is not None)
    if change is None:
        assert not changed
        assert _page_times(out) == before
    # The next one is current again.
    assert not LivePage(out).close()


def test_a_damaged_small_picture_is_named_when_the_page_is_made(tmp_path: Path) -> None:
    out = _finished(tmp_path / "out")
    (out / "outputs" / "a.png").write_bytes(b"damaged")
    _append(out / "results.jsonl")
    assert LivePage(out).close()
    assert "gone" in records(out)[0]["outputs"][0]


def test_the_last_page_of_a_short_run_has_all_thumbnails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.15 s; the run ends before the page could be made in between."""
    clock, out = Clock(monkeypatch), large(tmp_path / "out")

    def slow(file: Path, side: int) -> Image.Image:
        clock.work_s += 0.15
        return small(file, side)

    monkeypatch.setattr(thumbnails, "small", slow)
    page = LivePage(out)
    for n in range(4):
        Image.new("RGB", (1000, 750), (20 * n, 9, 9)).save(out / "outputs" / f"{n}.png")
        line = done("a") | {"custom_id": f"n{n}"}
        line["outputs"] = [line["outputs"][0] | {"path": f"outputs/{n}.png", "sha256": f"{n}" * 64}]
        with open(out / "results.jsonl", "a") as journal:
            journal.write(json.dumps(line) + "\n")
    page.look(DONE)
    settled(page)
    assert index(out)["files"] == [[5, 4]]
    page.close()
    assert index(out)["files"] == [[5, 0]]
