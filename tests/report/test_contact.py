"""The contact sheet shows what is in a run's folder, and says what it leaves out."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from report.browser import needs_browser, seen_in

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.report.contact import contact_sheet, is_current, write_contact_sheet

Lines = list[dict[str, Any]]


def done(name: str, **more: Any) -> dict[str, Any]:
    path = f"outputs/{name}.png"
    file = {"path": path, "width": 64, "height": 48, "seed": 5}
    times = {"queue": 3.0, "think": 0.25, "denoise_rest": 1.0, "total": 4.25}
    line = {"custom_id": name, "status": "done", "outputs": [file], "timings_s": times}
    return line | {"kv_reuse": {"status": "hit"}, "denoise_steps": 20} | more


def failed(name: str) -> dict[str, Any]:
    error = {"code": "source.missing", "message": "no such <file>", "hint": "give another"}
    return {"custom_id": name, "status": "failed", "outputs": [], "error": error}


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's folder with these result lines; each job edits `in.png`."""

    def write(*results: dict[str, Any], asked: Lines | None = None) -> Path:
        folder = tmp_path / "out"
        (folder / "outputs").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), "red").save(folder / "in.png")
        for line in results:
            for output in line["outputs"]:
                Image.new("RGB", (64, 48), "blue").save(folder / output["path"])
        names = [line["custom_id"] for line in results]
        shared = {"prompt": "make it <b>blue</b>", "images": ["in.png"], "seed": 5}
        asked = asked if asked is not None else [{"custom_id": name} | shared for name in names]
        for name, lines in (("results.jsonl", results), ("manifest.resolved.jsonl", asked)):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        info = {
            "manifest": {"name": "jobs.jsonl", "digest": "ab" * 32},
            "models": {"tiny-image": "cd" * 32},
            "versions": {"hyimg": "0.1.0"},
            "hardware": {"system": "Linux", "cpu": "CPU", "cores": 2, "gpus": []},
            "flags": {
                "seed": {"value": 7, "origin": "flag"},
                "size": {"value": "auto", "origin": "default"},
            },
        }
        (folder / "run.json").write_text(json.dumps(info))
        return folder

    return write


def test_a_card_has_all_that_belongs_to_a_job(write_run: Callable[..., Path]) -> None:
    text = "<think>The user wants blue.</think><recaption>A blue picture.</recaption>"
    page = contact_sheet(write_run(done("a", cot_text=text, warnings=["was slow"])))
    for part in (
        "1 done, 0 failed",
        "make it &lt;b&gt;blue&lt;/b&gt;",
        "A blue picture.",
        "The user wants blue.",
        "<dt>seed</dt><dd>5</dd>",
        "<dt>time</dt><dd>1.25 s</dd>",
        "denoise_rest 1.000 s",
        "<dt>KV reuse</dt><dd>hit</dd>",
        "was slow",
        "source: in.png",
        'href="outputs/a.png"',
        "seed (flag)",
    ):
        assert part in page, part
    assert "size (default)" not in page
    assert page.count("data:image/png") == 2


def test_failures_come_first_with_error_and_hint(write_run: Callable[..., Path]) -> None:
    page = contact_sheet(write_run(done("fine"), failed("broken")))
    assert "1 done, 1 failed" in page
    assert "1 failed with source.missing" in page
    assert "source.missing: no such &lt;file&gt;" in page
    assert "What to do: give another" in page
    assert page.index("<h3>broken</h3>") < page.index("<h3>fine</h3>")


def test_what_is_left_to_do_is_counted(write_run: Callable[..., Path]) -> None:
    asked = [{"custom_id": name, "prompt": "x"} for name in ("a", "b", "c")]
    page = contact_sheet(write_run(done("a"), asked=asked))
    assert "1 done, 0 failed, 2 left" in page
    assert "<h3>b</h3>" not in page


def test_a_result_that_the_manifest_no_longer_has_is_shown(write_run: Callable[..., Path]) -> None:
    assert "<h3>a</h3>" in contact_sheet(write_run(done("a"), asked=[]))


def test_a_cap_is_stated_and_keeps_failures(write_run: Callable[..., Path]) -> None:
    folder = write_run(*(done(f"j{n}") for n in range(4)), failed("broken"))
    page = contact_sheet(folder, most=2)
    assert "2 of 5 finished jobs are shown, failed ones first." in page
    assert page.count('<article class="card') == 2
    assert "4 done, 1 failed" in page
    assert "<h3>broken</h3>" in page


def test_pictures_that_are_gone_leave_a_note(write_run: Callable[..., Path]) -> None:
    folder = write_run(done("a"))
    (folder / "in.png").unlink()
    (folder / "outputs/a.png").write_bytes(b"damaged")
    page = contact_sheet(folder)
    assert "in.png cannot be shown: there is no such file" in page
    assert "a.png cannot be shown" in page
    assert "data:image" not in page


def test_a_video_is_linked_with_a_poster(write_run: Callable[..., Path], tmp_path: Path) -> None:
    line = done("clip")
    folder = write_run(line)
    line["outputs"][0]["path"] = "outputs/clip.mp4"
    (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    with av.open(str(folder / "outputs/clip.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb24"
        frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 90, np.uint8), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    page = contact_sheet(folder)
    assert 'href="outputs/clip.mp4"' in page
    assert "video: 64x48" in page
    assert page.count("data:image/png") == 2
    (folder / "outputs/clip.mp4").write_bytes(b"cut off")
    assert "clip.mp4 cannot be shown" in contact_sheet(folder)


def test_a_folder_without_a_run_is_an_empty_page(tmp_path: Path) -> None:
    assert "0 done, 0 failed" in contact_sheet(tmp_path)


def test_a_damaged_journal_is_an_error(write_run: Callable[..., Path]) -> None:
    folder = write_run(done("a"))
    (folder / "results.jsonl").write_text("{}\n" + json.dumps(done("a")) + "\n")
    with pytest.raises(OutputFolderError):
        contact_sheet(folder)


def test_a_page_is_current_until_another_result(write_run: Callable[..., Path]) -> None:
    folder = write_run(done("a"))
    assert not is_current(folder)
    path = write_contact_sheet(folder)
    assert (path, is_current(folder)) == (folder / "report.html", True)
    with open(folder / "results.jsonl", "a") as journal:
        journal.write(json.dumps(done("b")) + "\n")
    assert not is_current(folder)


@needs_browser
def test_a_browser_shows_the_sheet(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_run(done("a"), done("b"), failed("c"))
    seen = seen_in(contact_sheet(folder), tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == []
    assert not seen["sideways"]
    # Two results, and a source in each of three cards.
    assert seen["pictures"] == [40, 40, 64, 40, 64]
