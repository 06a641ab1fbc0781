"""Every page in a browser: in a window and on a phone, light and dark, by keyboard alone.

What a page says is compared whole: an old sentence is a fault.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from report import every_page
from report.browser import Tab, needs_browser
from report.test_use import IS_OPEN, text

from hyimg_cli.report.run_page import RunPage

pytestmark = needs_browser
WINDOWS = [(1366, "light"), (1366, "dark"), (390, "light"), (390, "dark")]
# Of each element with a text of its own: what sticks out, and what has too little contrast.
FAULTS = """
(() => {
  const rgb = (colour) => (colour.match(/[0-9.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = (colour) => rgb(colour).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const opaque = (colour) => rgb(colour)[3] === undefined || rgb(colour)[3] === 1;
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const texts = [...node.childNodes].filter((one) => one.nodeType === 3);
    const own = texts.map((one) => one.data.trim()).join("");
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    const unseen = "script, style, noscript, .unseen, :disabled";
    if (!own || !box.width || style.visibility === "hidden" || node.closest(unseen)) continue;
    const [a, b] = [light(style.color), light(ground(node))].sort((one, other) => other - one);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`contrast: ${own}`);
    const isOut = box.right > innerWidth + 1 && !node.closest("th, td, pre");
    if (isOut) found.push(`sticks out: ${own}`);
  }
  return found;
})()
"""
FOCUSED = """
(() => {
  const node = document.activeElement, style = getComputedStyle(node);
  if (node === document.body) return null;
  const ring = node.type === "range" ? getComputedStyle(node.parentElement) : style;
  const isSeen = ring.outlineStyle !== "none" && parseFloat(ring.outlineWidth) >= 2;
  return [isSeen, `${node.tagName} ${node.id || node.dataset.id || node.textContent.slice(0, 30)}`];
})()
"""
FOCUSABLE = """
[...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")].filter(
  (node) => node.checkVisibility() && !node.disabled && !node.closest("dialog")).length
"""


@pytest.fixture(scope="module", params=every_page.EVERY)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = every_page.EVERY[request.param]
    return make(tmp_path_factory.mktemp(request.param))


def open_page(tab: Tab, page: Path, width: int = 1366, scheme: str = "light") -> None:
    tab.open(page, width=width, height=900 if width > 500 else 800, scheme=scheme)
    tab.wait("document.querySelector('h1').textContent !== '…'")
    tab.wait("!document.querySelector('#cards') || document.querySelector('.card')")


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_all_of_a_page_can_be_read(tab: Tab, page: Path, width: int, scheme: str) -> None:
    open_page(tab, page, width, scheme)
    tab.wait("[...document.images].every((one) => one.complete)")
    assert tab.value("seenErrors") == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert tab.value(FAULTS) == []
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    level = int(ground.split("(")[1].split(",")[0])
    assert level > 200 if scheme == "light" else level < 60
    if tab.value("Boolean(document.querySelector('.job'))"):
        tab.click(".job")
        tab.wait(IS_OPEN)
        tab.wait("[...document.querySelectorAll('#show img')].every((one) => one.complete)")
        assert tab.value(FAULTS) == []
        assert tab.value("document.querySelector('.sheet').scrollWidth") <= width


@pytest.mark.parametrize("width", [1366, 390])
def test_all_of_a_page_is_reached_by_keyboard(tab: Tab, page: Path, width: int) -> None:
    open_page(tab, page, width)
    expected, reached = tab.value(FOCUSABLE), list[str]()
    tab.value("document.body.focus()")
    for _ in range(expected):
        tab.key("Tab")
        focused = tab.value(FOCUSED)
        assert focused, f"after {reached}"
        is_seen, name = focused
        assert is_seen, name
        reached.append(name)
    tab.key("Tab")
    assert tab.value(FOCUSED) is None, "nothing is left out of the count"
    if tab.value("Boolean(document.querySelector('.job'))"):
        tab.key("ArrowRight", "Enter")
        tab.wait(IS_OPEN)
        tab.key("Escape")
        tab.wait(f"!{IS_OPEN}")
        assert tab.value("Boolean(document.activeElement.dataset.id)"), "the focus is back"


def test_every_link_leads_to_a_file(tab: Tab, page: Path) -> None:
    open_page(tab, page)
    if tab.value("Boolean(document.querySelector('.job'))"):
        tab.click(".job")
        tab.wait(IS_OPEN)
    links = tab.value("[...document.querySelectorAll('a[href]')].map((one) => one.href)")
    for link in links:
        is_file = link.startswith("file://")
        assert is_file or link.startswith("data:"), link
        if is_file:
            name = tab.value(f"decodeURIComponent(new URL({link!r}).pathname)")
            assert Path(name).is_file()


HEADS = {
    "run": (
        "hyimg generate: jobs.jsonl",
        "3 done, 1 failed, 1 without an edit, 1 beyond a gate",
        "",
        "1 failed: source.missing|1 beyond a gate: max_spill",
        "bad",
    ),
    "candidates": (
        "hyimg generate: jobs.jsonl",
        "4 done, 0 failed, 1 line without an accepted candidate",
        "",
        "no accepted candidate: cat",
        "bad",
    ),
    "drafts": (
        "hyimg generate: jobs.jsonl",
        "4 done, 0 failed",
        "",
        "These are drafts; the picked ones in full",
        "good",
    ),
    "finals": (
        "hyimg generate: jobs.jsonl",
        "2 done, 0 failed",
        "",
        "The drafts of all candidates",
        "good",
    ),
    "batch": (
        f"hyimg serve: {every_page.BATCH}",
        "3 done, 0 failed, 1 left",
        "Stopped: 3 of 4 pictures, 2 of 3 requests. "
        "A batch that was not cancelled goes on when the server runs again.",
        "",
        "neutral",
    ),
    "replay": ("hyimg generate: jobs.jsonl", "1 done, 0 failed", "", "", "good"),
    "single": (
        "hyimg generate: jobs.jsonl",
        "3 done, 1 failed, 1 without an edit, 1 beyond a gate",
        "",
        "1 failed: source.missing|1 beyond a gate: max_spill",
        "bad",
    ),
}


def head_of(tab: Tab) -> tuple[str, ...]:
    reasons = (
        "[...document.querySelectorAll('#reasons li')].map((one) => one.textContent).join('|')"
    )
    tone = tab.value("document.querySelector('#summary').className").removeprefix("tone-")
    said = (text(tab, selector) for selector in (".title", "#verdict", "#state"))
    return (*said, tab.value(reasons), tone)


@pytest.mark.parametrize("page", HEADS, indirect=True)
def test_the_head_of_a_page_says_what_became_of_the_run(
    tab: Tab, page: Path, request: pytest.FixtureRequest
) -> None:
    open_page(tab, page)
    assert head_of(tab) == HEADS[request.node.callspec.params["page"]]


def test_a_draft_that_failed_is_in_both_heads(tab: Tab, tmp_path: Path) -> None:
    page = every_page.drafts(tmp_path, fails=True)
    open_page(tab, page)
    assert head_of(tab)[1:] == (
        "3 done, 1 failed",
        "",
        "1 failed: source.missing|These are drafts; the picked ones in full",
        "bad",
    )
    tab.click("#reasons a")
    tab.wait("document.querySelector('#verdict')?.textContent === '2 done, 0 failed'")
    tab.wait("document.querySelector('.card')")
    assert head_of(tab)[1:] == (
        "2 done, 0 failed", "", "The drafts of all candidates: 1 failed", "bad"
    )  # fmt: skip


def test_candidates_that_are_not_picked_yet_are_not_green(tab: Tab, tmp_path: Path) -> None:
    page = every_page.candidates(tmp_path)
    (page.parent / "picks.jsonl").unlink()
    RunPage(page.parent).refresh()
    open_page(tab, page)
    assert head_of(tab)[1:] == (
        "4 done, 0 failed", "The candidates are not picked yet.", "", "neutral"
    )  # fmt: skip


def test_a_batch_at_work_counts_pictures_and_requests(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, every_page.batch(tmp_path, is_running=True))
    state = text(tab, "#state")
    assert state.startswith("Running: 3 of 4 pictures, 2 of 3 requests at ")
    assert state.endswith(". New jobs appear automatically.")
    assert tab.value("document.title") == f"3/4 {every_page.BATCH}"


@pytest.mark.parametrize("kind", ["candidates", "drafts", "single"])
def test_a_choice_prints_the_command_for_the_real_folder(
    tab: Tab, tmp_path: Path, kind: str
) -> None:
    if kind == "drafts":
        open_page(tab, every_page.drafts(tmp_path))
        folder = f"'{tmp_path}/cand'\\''s'"
    else:
        path = every_page.candidates(tmp_path)
        folder = f"'{path.parent}'"
        if kind == "single":
            alone = tmp_path / "page.html"
            alone.write_text(every_page.single_file(path.parent))
            path, folder = alone, "RUN"
        open_page(tab, path)
    tab.click(".job[data-id='bus-1']")
    tab.wait(IS_OPEN)
    tab.click("#about button")
    assert text(tab, "#command") == f"hyimg pick {folder} --choose bus=bus-1"
    assert text(tab, "#saved") == f"hyimg pick {folder} --choices choices.jsonl"


def test_a_candidate_says_its_value_once(tab: Tab, tmp_path: Path) -> None:
    open_page(tab, every_page.candidates(tmp_path))
    tab.wait("document.querySelector('.job[data-id=cat-0] .says')")
    assert text(tab, ".job[data-id='cat-0'] .says") == "text 0.5 < 0.6"
    assert text(tab, ".job[data-id='bus-0'] .says") == "text 0.75"
