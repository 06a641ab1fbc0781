"""The page of a run in a browser, used as by a person: at two widths, with few and many jobs."""

import json
from pathlib import Path

import pytest
from PIL import Image
from report import every_page
from report.browser import Tab, needs_browser
from report.folders import asked, done, failed, picture, synthetic, write_run
from report.test_run_page import HOSTILE, film

from hyimg_cli.report.run_page import RunPage

pytestmark = needs_browser
WIDTHS = pytest.mark.parametrize("width", [1400, 400])
SHOWN = "document.querySelectorAll('.card').length"
IS_OPEN = "document.querySelector('#viewer').open"
FIRST_CARDS_S = 1.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of 9, 300 and 3,000 jobs, with their pages."""
    found = {}
    for count in (9, 300, 3000):
        found[count] = synthetic(tmp_path_factory.mktemp(str(count)) / "out", count)
        RunPage(found[count]).refresh()
    return found


def opened(tab: Tab, folder: Path, width: int = 1400) -> None:
    tab.open(folder / "report.html", width=width)
    tab.wait(SHOWN)


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(tab: Tab, selector: str) -> int:
    return int(tab.value(f"document.querySelectorAll({json.dumps(selector)}).length"))


@WIDTHS
@pytest.mark.parametrize("jobs", [9, 300, 3000])
def test_cards_come_at_once_and_others_by_scrolling(
    tab: Tab, runs: dict[int, Path], jobs: int, width: int
) -> None:
    opened(tab, runs[jobs], width)
    assert tab.worked_s < FIRST_CARDS_S
    tab.wait(f"document.querySelector('#count').textContent.startsWith('{jobs:,} job')")
    assert f"{jobs - jobs // 50 - (jobs % 50 > 7)} done" in text(tab, "#verdict")
    assert tab.value("document.documentElement.scrollWidth") == width, "nothing sticks out"
    tab.wait("[...document.images].slice(0, 4).every((image) => image.naturalWidth > 0)")
    cards = int(text(tab, "#count").split(", ")[1].split()[0].replace(",", ""))
    while (before := count(tab, ".card")) < min(cards, 400):
        tab.value("scrollTo(0, document.body.scrollHeight)")
        tab.wait(f"{SHOWN} > {before}")
    assert tab.value("seenErrors") == []


@WIDTHS
def test_search_and_filters_find_jobs(tab: Tab, runs: dict[int, Path], width: int) -> None:
    opened(tab, runs[300], width)
    tab.key("/")
    assert tab.value("document.activeElement.id") == "query"
    tab.type("number 223. disc")  # words of the recaption, in any order
    tab.wait(f"{SHOWN} === 1")
    assert tab.value("document.querySelector('.job').dataset.id") == "photo-0111-1"
    tab.key("Escape")
    tab.wait("document.querySelector('#count').textContent.startsWith('300 jobs')")
    tab.click("[data-show=failed]")
    tab.wait("document.querySelector('#count').textContent.startsWith('6 jobs')")
    assert tab.value(
        "[...document.querySelectorAll('.job')].every((one) => "
        "one.textContent.includes('source.missing'))"
    )
    tab.click("[data-show=warned]")
    tab.wait("document.querySelector('#count').textContent.startsWith('8 jobs')")
    tab.click("[data-show=all]")
    tab.value("(source.value = '0007.png', source.dispatchEvent(new Event('change')))")
    tab.wait(f"{SHOWN} === 1")
    assert text(tab, ".card h2") == "0007.png"
    assert count(tab, ".card .job") > 1, "one card has all jobs of a source"
    tab.click("#query")
    tab.type("nothing has this")
    tab.wait(f"{SHOWN} === 0")
    tab.click("#clear")
    tab.wait("document.querySelector('#count').textContent.startsWith('300 jobs')")


@WIDTHS
def test_a_click_opens_both_pictures_and_the_slider_moves(
    tab: Tab, runs: dict[int, Path], width: int
) -> None:
    opened(tab, runs[9], width)
    tab.click(".job[data-id='photo-0001-0']")
    tab.wait(IS_OPEN)
    tab.wait("document.querySelector('#over')?.naturalWidth === 96")
    tab.wait("document.querySelector('#under').naturalWidth === 64")
    assert tab.value("document.querySelector('.stage').clientWidth") > 0.6 * min(width, 1000)
    left, top, wide, high = tab.value(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('#slider').getBoundingClientRect())"
    )
    shown = "getComputedStyle(document.querySelector('#over')).clipPath"
    assert tab.value(shown) == "inset(0px 50% 0px 0px)"
    tab.press(left + wide / 4, top + high / 2)
    assert tab.value(shown) == "inset(0px 75% 0px 0px)"
    tab.key("ArrowUp")
    assert tab.value(shown) == "inset(0px 70% 0px 0px)"
    tab.key("s")
    tab.wait("document.querySelectorAll('.pair img').length === 2")
    tab.key("s", "Escape")
    tab.wait(f"!{IS_OPEN}")
    tab.wait("document.activeElement.dataset.id === 'photo-0001-0'")


def test_keys_go_from_job_to_job(tab: Tab, runs: dict[int, Path]) -> None:
    opened(tab, runs[300])
    tab.wait("document.querySelector('#count').textContent.startsWith('300 jobs')")
    order = tab.value("[...document.querySelectorAll('.job')].map((one) => one.dataset.id)")
    focused = "document.activeElement.dataset.id"
    tab.key("ArrowRight", "ArrowRight", "j", "ArrowLeft")
    assert tab.value(focused) == order[1]
    tab.key("Enter")
    tab.wait(IS_OPEN)
    assert text(tab, "#viewer-title") == order[1]
    tab.key("ArrowRight", "j")
    assert text(tab, "#viewer-title") == order[3]
    tab.key("k")
    assert (text(tab, "#viewer-title"), text(tab, "#position")) == (order[2], "3 of 300")
    assert tab.value("location.hash") == f"#job={order[2]}"
    tab.click("#next")
    assert text(tab, "#viewer-title") == order[3]
    tab.click("#close")
    tab.wait(f"!{IS_OPEN}")
    tab.wait(f"{focused} === '{order[3]}'")


def test_an_open_page_takes_up_new_jobs_and_keeps_what_is_looked_at(
    tab: Tab, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    picture(tmp_path / "in.png", 1)
    picture(out / "outputs/a.png", 2)
    lines = [done(name, "outputs/a.png") for name in "ab"]
    page = RunPage(write_run(out, lines[:1], [asked(name, seed=n) for n, name in enumerate("ab")]))
    page.refresh(is_running=True)
    opened(tab, out)
    assert "Running: 1 of 2" in text(tab, "#state")
    tab.key("ArrowRight")
    with open(out / "results.jsonl", "a") as journal:
        journal.write(json.dumps(lines[1]) + "\n")
    page.refresh()
    tab.wait("document.querySelectorAll('.job').length === 2")
    assert text(tab, "#verdict") == "2 done, 0 failed"
    assert tab.value("document.activeElement.dataset.id") == "a"


def test_an_open_job_stays_open_while_others_come(tab: Tab, tmp_path: Path) -> None:
    out = tmp_path / "out"
    picture(out / "outputs/a.png", 2)
    lines = [done(name, "outputs/a.png") for name in "ba"]
    page = RunPage(write_run(out, lines[:1], [asked(name, images=[]) for name in "ab"]))
    page.refresh(is_running=True)
    opened(tab, out)
    tab.click(".job")
    tab.wait(IS_OPEN)
    with open(out / "results.jsonl", "a") as journal:
        journal.write(json.dumps(lines[1]) + "\n")
    page.refresh()
    tab.wait("document.querySelector('#position').textContent === '2 of 2'")
    assert tab.value(IS_OPEN)
    assert text(tab, "#viewer-title") == "b"


def test_films_play_and_what_is_gone_is_said(tab: Tab, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "outputs").mkdir()
    film(out / "outputs/clip.mp4")
    jobs = [asked("film", task="t2v", images=[]), asked("lost"), asked("bad", prompt=HOSTILE)]
    write_run(out, [done("film", "outputs/clip.mp4"), done("lost"), failed("bad", HOSTILE)], jobs)
    RunPage(out).refresh()
    opened(tab, out)
    assert "2 jobs with a picture that is missing or cannot be read" in text(tab, "#reasons")
    tab.click(".job[data-id='film']")
    tab.wait("document.querySelector('video')?.currentTime > 0")
    tab.key("j")
    assert "file not found" in text(tab, "#show")
    tab.key("j")
    assert "What to do: give another" in text(tab, "#about")
    assert HOSTILE in text(tab, "#about")
    assert tab.value("seenErrors") == []
    assert tab.value("document.querySelector('[onerror]') === null")


def test_a_page_without_its_folder_says_so(tab: Tab, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", [done("a")], [])
    RunPage(out).refresh()
    alone = tmp_path / "report.html"
    alone.write_bytes((out / "report.html").read_bytes())
    tab.open(alone)
    tab.wait("document.querySelector('#verdict').textContent.includes('report/')")


def test_a_run_beyond_its_gates_is_not_green_and_names_them(tab: Tab, tmp_path: Path) -> None:
    for n, name in enumerate(("in", "out/outputs/a", "out/outputs/a.redraw", "out/outputs/b")):
        picture(tmp_path / f"{name}.png", n)
    breach = "max_spill 0.1: the fraction of the edit outside the region is 0.5"
    edit = {"kind": "none", "gates": [breach], "plain": "outputs/a.redraw.png"}
    lines = [done("a", edit=edit, warnings=[f"gate: {breach}"]), done("b")]
    RunPage(write_run(tmp_path / "out", lines, [asked("a"), asked("b")])).refresh()
    opened(tab, tmp_path / "out")
    assert text(tab, "#verdict") == "2 done, 0 failed, 1 without an edit, 1 beyond a gate"
    assert tab.value("document.querySelector('#summary').className") == "tone-bad"
    assert text(tab, "#reasons") == "1 beyond a gate: max_spill"
    tab.click("#reasons button")
    tab.wait("document.querySelectorAll('.job').length === 1")
    tab.click(".job")
    tab.wait(IS_OPEN)
    assert "open a.redraw.png" in text(tab, "#about")


def test_a_run_that_kept_no_source_is_not_green_and_shows_which(tab: Tab, tmp_path: Path) -> None:
    for n, name in enumerate("abcd"):
        picture(tmp_path / f"out/outputs/{name}.png", n)
    whole = "the whole picture was edited (area 0.7 > 0.55): the source was not kept"
    lines = [done("a", edit={"kind": "global", "gates": []}, warnings=[whole])]
    lines += [done("b", edit={"kind": "background", "gates": []}, notes=["turned"]), done("c")]
    jobs = [asked(name, images=[f"../{name}.png"]) for name in "abc"]
    RunPage(write_run(tmp_path / "out", lines, jobs)).refresh()
    opened(tab, tmp_path / "out")
    assert text(tab, "#verdict") == "3 done, 0 failed, source not kept: 1 of 2"
    assert tab.value("document.querySelector('#summary').className") == "tone-warn"
    marks = "[...document.querySelectorAll('.mark')].map((one) => one.textContent)"
    assert tab.value(marks) == ["source not kept"], "a note marks no job"
    assert text(tab, "[data-show=warned]") == "warned 1"
    tab.click("#reasons button")
    tab.wait("document.querySelectorAll('.job').length === 1")
    assert tab.value("document.querySelector('.job').dataset.id") == "a"
    assert tab.value("document.querySelector('[data-show=unkept]').ariaPressed") == "true"
    # A warning of any other kind is not green, either; with nothing to look at, the page is.
    RunPage(write_run(tmp_path / "out", [done("a", warnings=["cut off"])], jobs[:1])).refresh()
    opened(tab, tmp_path / "out")
    assert tab.value("document.querySelector('#summary').className") == "tone-warn"
    assert tab.value("document.querySelector('[data-show=unkept]').hidden")
    RunPage(write_run(tmp_path / "out", [done("a", notes=["turned"])], jobs[:1])).refresh()
    opened(tab, tmp_path / "out")
    assert tab.value("document.querySelector('#summary').className") == "tone-good"


def test_an_edit_of_a_part_shows_where_it_was_drawn_and_that_part_pixel_by_pixel(
    tab: Tab, tmp_path: Path
) -> None:
    opened(tab, every_page.run(tmp_path).parent)
    tab.click(".job[data-id=bus]")
    tab.wait(IS_OPEN)
    said = "drawn at 1.33 drawn pixels per pixel, 0 of 2,792 pixels outside differ, seam 1.6 levels"
    assert text(tab, ".proof") == said
    wide = tab.value("document.querySelector('.stage').clientWidth")
    for name, left, width in (("crop", 8, 48), ("region", 20, 20)):
        found = tab.value(f"[...'xy'].map((a) => document.querySelector('.box.{name}')"
                          f"[a === 'x' ? 'offsetLeft' : 'offsetWidth'])")  # fmt: skip
        assert found == pytest.approx([left / 64 * wide, width / 64 * wide], abs=2)
    parts = "[...document.querySelectorAll('.part')].map((p) => [p.clientWidth, p.clientHeight])"
    assert tab.value(parts) == [[48, 36]] * 3
    places = "[...document.querySelectorAll('.part img')].map((i) => [i.offsetLeft, i.clientWidth])"
    assert tab.value(places) == [[-8, 64], [0, 48], [-8, 64]]
    assert tab.value("seenErrors") == []


@pytest.mark.parametrize("level", [0, 255])
def test_a_mask_shows_on_dark_and_on_light_pictures(tab: Tab, tmp_path: Path, level: int) -> None:
    """Its left half was edited."""
    for name in ("in", "out/outputs/edit", "out/outputs/edit.mask"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("L", (64, 48), 0 if name.endswith("mask") else level)
        image.paste(255 if name.endswith("mask") else level, (0, 0, 32, 48))
        image.save(path)
    line = done("edit", edit={"kind": "local", "mask": "outputs/edit.mask.png"})
    RunPage(write_run(tmp_path / "out", [line], [asked("edit")])).refresh()
    opened(tab, tmp_path / "out")
    tab.key("ArrowRight", "Enter", "m")
    for mode in ("one over the other", "side by side"):
        tab.wait("[...document.querySelectorAll('.mask')].filter((m) => m.naturalWidth).length > 1")
        left, top, wide, high = tab.value(
            "(({left, top, width, height}) => [left, top, width, height])"
            "(document.querySelector('.mask').getBoundingClientRect())"
        )
        tab.picture(tmp_path / "seen.png")
        with Image.open(tmp_path / "seen.png") as seen:
            edited, kept = (
                seen.convert("L").getpixel((round(left + wide * at), round(top + high / 4)))
                for at in (0.2, 0.8)
            )
        assert edited == level, mode
        assert abs(kept - level) > 60, mode
        tab.key("s")
    tab.key("m")
    tab.wait("!document.querySelector('.mask')")
