"""The data of a run's page: contents of a record, when it is written, and what is left out."""

import json
import os
import time
from dataclasses import field, make_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from report.folders import asked, done, failed, picture, write_run

from hyimg_cli.errors import OutputFolderError, StorageError, UsageError
from hyimg_cli.media.images import read_image
from hyimg_cli.report import thumbnails
from hyimg_cli.report.run_page import RunPage
from hyimg_cli.report.single_file import single_file
from hyimg_cli.report.thumbnails import SIDE, small
from hyimg_cli.spec.events import Outcome

HOSTILE = "</script><img src=x onerror=alert(1)> \u2028 \ud800 {{ 7 * 7 }}"


def given(folder: Path, name: str) -> list[Any]:
    """What the calls of a data script hand over."""
    text = (folder / "report" / name).read_text(encoding="utf-8")
    start, end = text.index("("), text.rindex(")")
    arguments: list[Any] = json.loads(f"[{text[start + 1 : end]}]")
    return arguments


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "report").glob("data-*.js"))
    return [one for n, file in enumerate(files) for one in given(folder, file.name)[1]]


def index(folder: Path) -> dict[str, Any]:
    (value,) = given(folder, "index.js")
    return dict(value)


def bytes_in(folder: Path) -> dict[str, bytes]:
    files = [folder / "report.html", *(folder / "report").rglob("*.*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    picture(tmp_path / "in.png", 1, size=(40, 30))
    picture(tmp_path / "out/outputs/a.png", 2)
    return tmp_path / "out"


def test_a_record_has_all_that_belongs_to_a_job(out: Path) -> None:
    text = "<think>The user wants blue.</think><recaption>A blue picture.</recaption>"
    line = done("a", cot_text=text, warnings=["was slow"], notes=["was turned"], attempt=2)
    write_run(out, [line], [asked("a", guidance_scale=2.5, model="/models/big")])
    assert RunPage(out).refresh()
    (found,) = records(out)
    assert found["prompt"] == "make it <b>blue</b>"
    assert found["sources"] == [{"name": "in.png", "link": "../in.png"}]
    assert found["outputs"] == [
        {"name": "a.png", "link": "outputs/a.png", "width": 64, "height": 48, "seed": 5}
    ]
    assert found["texts"] == [["recaption", "A blue picture."], ["think", "The user wants blue."]]
    facts = [["steps", "20"], ["time", "1.2 s"], ["KV reuse", "hit"], ["attempt", "2"]]
    assert found["facts"] == [*facts, ["note", "was turned"]]
    assert ["guidance_scale", "2.5"] in found["settings"]
    assert ["model", "big"] in found["settings"]
    assert found["phases"][-1] == ["waited", "3.000 s"]
    assert found["warnings"] == ["was slow"]


def test_a_field_of_the_line_with_a_label_is_a_fact(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("lost_rows", int, field(default=0, metadata={"label": "lost rows"}))
    monkeypatch.setattr(
        "hyimg_cli.report.records.Outcome",
        make_dataclass("Line", [own], bases=(Outcome,), frozen=True),
    )
    write_run(out, [done("a", lost_rows=3), done("b", lost_rows=0)], [asked("a"), asked("b")])
    assert RunPage(out).refresh()
    a, b = records(out)
    assert ["lost rows", "3"] in a["facts"]
    assert "lost rows" not in dict(b["facts"])


def test_the_index_counts_what_is_done_failed_and_left(out: Path) -> None:
    write_run(out, [done("a"), failed("b"), done("gone")], [asked(n) for n in ("a", "b", "c")])
    RunPage(out).refresh(is_running=True)
    found = index(out)
    assert (found["done"], found["failed"], found["left"]) == (2, 1, 1)
    assert found["files"] == [[3, 0]]
    assert 0 <= time.time() - found["running"] < 60, "the page says when it was so"
    assert ["seed (flag)", "7"] in found["environment"]
    assert not any(name.startswith("size") for name, _ in found["environment"])
    # A result whose job the manifest no longer has stands behind all others.
    assert [one["place"] for one in records(out)] == [0, 1, 3]


def test_a_job_of_two_crops_has_both_with_their_regions_and_redraws(out: Path) -> None:
    crops = [
        {"box": [0, 0, 20, 20], "drawn": [64, 64]},
        {"box": [30, 30, 60, 45], "drawn": [64, 64]},
    ]
    edit = {"kind": "local", "gates": [], "crop": crops, "box": [5, 5, 45, 40]}
    for kind, name in (("plain", "a.redraw.png"), ("plain-2", "a.redraw-2.png")):
        picture(out / "outputs" / name, 3)
        edit[kind] = f"outputs/{name}"
    jobs = [asked("a", region="5,5,10,10;40,32,45,40"), asked("b", region="mask.png")]
    write_run(out, [done("a", edit=edit), done("b", edit=edit)], jobs)
    RunPage(out).refresh()
    boxes, mask = (one["crop"] for one in records(out))
    assert [name for name, _ in boxes["frames"]] == ["crop", "crop", "region", "region"]
    assert [part["middle"] for part in boxes["parts"]] == [[5, 5, 10, 10], [40, 32, 45, 40]]
    assert [part["redraw"]["name"] for part in boxes["parts"]] == ["a.redraw.png", "a.redraw-2.png"]
    assert [name for name, _ in mask["frames"]] == ["crop", "crop", "edit"]
    assert [part["middle"] for part in mask["parts"]] == [None, None]


def test_what_is_beyond_a_gate_is_counted_and_a_redraw_is_linked(out: Path) -> None:
    edit = {"kind": "none", "gates": [], "plain": "outputs/a b.redraw.png"}
    breach = {"kind": "global", "gates": ["max_edited_area 0.5: …"], "plain": "outputs/lost.png"}
    picture(out / "outputs" / "a b.redraw.png", 3)
    write_run(out, [done("a", edit=edit), done("b", edit=breach)], [asked("a"), asked("b")])
    RunPage(out).refresh()
    found = index(out)
    assert (found["done"], found["failed"], found["gated"]) == (2, 0, 1)
    assert "gated" in single_file(out)
    redraws = [one.get("redraws") for one in records(out)]
    assert redraws == [[{"name": "a b.redraw.png", "link": "outputs/a%20b.redraw.png"}], None]
    # As in a run that goes on: the last line of a job counts.
    write_run(out, [done("a", edit=edit), done("b", edit=breach), done("b", edit=edit)], [])
    RunPage(out).refresh()
    assert index(out)["gated"] == 0


def test_a_page_is_the_same_however_it_was_made(out: Path) -> None:
    """Line by line while the run went on, with a job tried again, or all at once."""
    lines = [*(done(f"j{n}") for n in range(450)), failed("b"), done("b")]
    jobs = [asked(f"j{n}") for n in range(450)] + [asked("b")]
    page = RunPage(write_run(out, lines[:0], jobs))
    page.refresh(is_running=True)
    with open(out / "results.jsonl", "a") as journal:
        for n, line in enumerate(lines):
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            if n % 90 == 0:
                page.refresh(is_running=True)
    assert page.refresh()
    grown = bytes_in(out)
    assert sorted(grown) == sorted(
        ["report.html", "report/index.js", *(f"report/data-{n:04}.js" for n in (1, 2, 3))]
    )
    assert not RunPage(out).refresh(), "nothing has changed"
    for path in (out / "report").iterdir():
        path.unlink()
    RunPage(out).refresh()
    assert bytes_in(out) == grown


def test_only_files_with_news_are_written(out: Path) -> None:
    page = RunPage(write_run(out, [done(f"j{n}") for n in range(250)], []))
    page.refresh()
    before = {path: path.stat().st_ino for path in (out / "report").glob("*.js")}
    with open(out / "results.jsonl", "a") as journal:
        journal.write(json.dumps(done("new")) + "\n" + '{"custom_id": "cut o')
    page.refresh()
    changed = [path.name for path, inode in before.items() if path.stat().st_ino != inode]
    assert sorted(changed) == ["data-0002.js", "index.js"]
    assert [one["id"] for one in given(out, "data-0002.js")[1]][-1] == "new"


def test_no_text_ends_a_script_or_breaks_its_file(out: Path) -> None:
    line = failed("a") | {"error": {"code": HOSTILE, "message": HOSTILE, "hint": HOSTILE}}
    write_run(out, [line], [asked("a", prompt=HOSTILE, images=[HOSTILE])])
    RunPage(out).refresh()
    for path in (out / "report").iterdir():
        assert "<" not in path.read_text(encoding="utf-8")
    (found,) = records(out)
    assert (found["prompt"], found["error"]["hint"]) == (HOSTILE, HOSTILE)
    assert found["sources"][0]["gone"] == "file not found"


# --- thumbnails


def large(out: Path) -> Path:
    """A run of one edit whose source and result are too large to be shown as they are."""
    picture(out.parent / "in.png", 1, size=(1200, 900))
    picture(out / "outputs/a.png", 2, size=(1000, 750))
    line = done("a")
    line["outputs"][0] |= {"width": 1000, "height": 750}
    return write_run(out, [line], [asked("a")])


def thumbs_of(out: Path) -> list[Path]:
    (found,) = records(out)
    shown = [*found.get("sources", ()), *found["outputs"]]
    return [out / one["thumb"] for one in shown if "thumb" in one]


def test_thumbnails_are_small_and_made_once(out: Path) -> None:
    RunPage(large(out)).refresh()
    thumbs = thumbs_of(out)
    assert [read_image(path).pixels.shape for path in thumbs] == [(240, SIDE, 3)] * 2
    before = [path.stat().st_ino for path in thumbs]
    RunPage(out).refresh()
    assert [path.stat().st_ino for path in thumbs] == before
    # Another source under the same name is another picture.
    picture(out.parent / "in.png", 5, size=(1200, 600))
    RunPage(out).refresh()
    assert read_image(thumbs_of(out)[0]).pixels.shape == (160, SIDE, 3)


def test_thumbnails_that_take_too_long_are_made_later(out: Path) -> None:
    page = RunPage(large(out))
    page.refresh(thumbnails_s=0.0)
    assert (page.is_waiting, index(out)["files"], thumbs_of(out)) == (True, [[1, 1]], [])
    page.refresh()
    assert (page.is_waiting, index(out)["files"], len(thumbs_of(out))) == (False, [[1, 0]], 2)


def test_a_folder_that_is_moved_meanwhile_is_not_made_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(file: Path, side: int) -> Image.Image:
        image = small(file, side)
        out.rename(out.with_name("elsewhere"))
        return image

    monkeypatch.setattr(thumbnails, "small", moved)
    with pytest.raises(StorageError, match="the folder does not exist"):
        RunPage(large(out)).refresh()
    assert not out.exists()


def test_pictures_that_are_gone_leave_a_word_and_their_thumbnail(out: Path) -> None:
    RunPage(large(out)).refresh()
    (out / "outputs/a.png").unlink()
    (out.parent / "in.png").write_bytes(b"damaged")
    RunPage(out).refresh()
    (found,) = records(out)
    assert found["outputs"][0]["gone"] == "file not found"
    assert (out / found["outputs"][0]["thumb"]).is_file()
    assert found["sources"][0]["gone"] == "the file is not an image"


def test_results_without_a_digest_have_a_thumbnail_each(out: Path) -> None:
    lines = [done(name, f"outputs/{name}.png") for name in ("a", "b")]
    for number, line in enumerate(lines):
        picture(out / line["outputs"][0]["path"], number, size=(1000, 750))
        del line["outputs"][0]["sha256"]
        line["outputs"][0] |= {"width": 1000, "height": 750}
    write_run(out, lines, [])
    RunPage(out).refresh()
    thumbs = [one["outputs"][0]["thumb"] for one in records(out)]
    assert len({(out / thumb).read_bytes() for thumb in thumbs}) == 2


@pytest.mark.parametrize("suffix", ["jpg", "webp", "tiff"])
def test_other_kinds_of_pictures_are_shown(out: Path, suffix: str) -> None:
    """What a browser cannot show itself has a thumbnail however small it is."""
    with Image.open(out / "outputs/a.png") as image:
        image.save(out / f"outputs/b.{suffix}")
    write_run(out, [done("a", f"outputs/b.{suffix}")], [])
    RunPage(out).refresh()
    assert len(thumbs_of(out)) == (suffix == "tiff")


def film(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for level in range(0, 160, 10):
            pixels = np.full((48, 64, 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def test_a_video_has_its_first_frame(out: Path) -> None:
    film(out / "outputs/clip.mp4")
    write_run(out, [done("a", "outputs/clip.mp4")], [])
    RunPage(out).refresh()
    (found,) = records(out)
    assert found["outputs"][0]["is_video"]
    assert len(thumbs_of(out)) == 1
    (out / "outputs/clip.mp4").write_bytes(b"cut off")
    os.utime(out / "outputs/clip.mp4", (1, 1))
    RunPage(out).refresh()
    assert "cannot be read" in records(out)[0]["outputs"][0]["gone"]


def test_names_are_what_sources_do_not_share_and_links_lead_there(out: Path) -> None:
    names = ["b/ä #1.png", "c/x.png"]
    for name in names:
        picture(out.parent / "photos" / name, 1)
    jobs = [asked(str(n), images=[f"../photos/{name}"]) for n, name in enumerate(names)]
    write_run(out, [done("0"), done("1")], jobs)
    RunPage(out).refresh()
    sources = [one["sources"][0] for one in records(out)]
    assert [one["name"] for one in sources] == names
    assert sources[0]["link"] == "../photos/b/%C3%A4%20%231.png"


# --- folders


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the output folder of a run"):
        RunPage(tmp_path)


@pytest.mark.parametrize("name", ["results.jsonl", "manifest.resolved.jsonl"])
def test_a_damaged_folder_is_an_error_of_its_own_kind(out: Path, name: str) -> None:
    write_run(out, [done("a")], [asked("a")])
    (out / name).write_text("{\n" + json.dumps(done("a")) + "\n")
    with pytest.raises(OutputFolderError):
        RunPage(out).refresh()


def test_a_run_of_which_only_results_are_left_has_a_page(out: Path) -> None:
    write_run(out, [done("a")], [])
    for name in ("run.json", "manifest.resolved.jsonl"):
        (out / name).unlink()
    RunPage(out).refresh()
    assert (index(out)["title"], len(records(out))) == ("out", 1)
