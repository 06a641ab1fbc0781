"""One file with everything inside: whole, capped, and without a path of the machine."""

import re
from pathlib import Path

import pytest
from PIL import Image
from report.browser import Tab, needs_browser
from report.folders import asked, done, picture, synthetic, write_run
from report.test_run_page import HOSTILE, film

from hyimg_cli.report.single_file import single_file


def test_pictures_are_inside_once_each(tmp_path: Path) -> None:
    page = single_file(synthetic(tmp_path / "out", 120))
    # 60 results, 60 sources, less those of jobs that failed.
    assert 100 < page.count("data:image/png;base64,") <= 120
    assert str(tmp_path) not in page
    assert "../photos" not in page
    assert 'src="report/' not in page


def test_a_cap_is_said(tmp_path: Path) -> None:
    page = single_file(synthetic(tmp_path / "out", 120), most_mb=0.01)
    assert "pictures were left out, because this file holds at most 0.01 MB" in page
    assert "left out of this file" in page
    assert sum(map(len, re.findall(r'"data:image/[^"]+"', page))) < 11_000


@needs_browser
def test_it_shows_pictures_and_films_from_anywhere(tmp_path: Path, tab: Tab) -> None:
    out = tmp_path / "out"
    Image.effect_noise((1000, 750), 90).save(tmp_path / "in.png")
    picture(out / "outputs/a.png", 4)
    film(out / "outputs/clip.mp4")
    lines = [done("a", cot_text=HOSTILE), done("b", "outputs/clip.mp4")]
    write_run(out, lines, [asked("a", prompt=HOSTILE), asked("b", task="t2v", images=[])])
    (tmp_path / "sent").mkdir()
    page = tmp_path / "sent/page.html"
    page.write_bytes(single_file(out).encode("utf-8", "backslashreplace"))
    tab.open(page)
    tab.wait("document.querySelectorAll('.job img').length === 2")
    tab.wait("[...document.images].every((image) => image.naturalWidth > 0)")
    assert "scaled down" in tab.value("document.querySelector('#reasons').textContent")
    tab.click(".job[data-id='a']")
    tab.wait("document.querySelector('#over')?.naturalWidth === 640")
    tab.key("j")
    tab.wait("document.querySelector('video')?.currentTime > 0")
    assert tab.value("seenErrors") == []
    assert (
        tab.value(
            "performance.getEntriesByType('resource').filter("
            "(one) => !one.name.startsWith('data:')).length"
        )
        == 0
    )
    assert tab.value("document.querySelector('[onerror]') === null")


@pytest.mark.parametrize("most_mb", [0.0, 24.0])
def test_pictures_that_are_gone_leave_a_word(tmp_path: Path, most_mb: float) -> None:
    out = write_run(tmp_path / "out", [done("a")], [asked("a")])
    assert single_file(out, most_mb=most_mb).count("file not found") == 2


def test_a_page_of_some_jobs_counts_and_shows_these_alone(tmp_path: Path) -> None:
    lines = [done("a", cot_text="zebra"), done("b", cot_text="giraffe")]
    out = write_run(tmp_path / "out", lines, [asked("a"), asked("b"), asked("c")])
    page = single_file(out, only={"b", "c"})
    assert ("giraffe" in page, "zebra" in page) == (True, False)
    assert '"done":1' in page
    assert '"left":1' in page
