"""Pages are complete in themselves, escaped, and work in a browser."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report.browser import needs_browser, seen_in

from hyimg_cli.report.blocks import (
    Bar,
    Bars,
    Card,
    Cards,
    Commands,
    Compare,
    Facts,
    Gallery,
    Page,
    Row,
    Section,
    Span,
    Table,
    Text,
    Verdict,
)
from hyimg_cli.report.page import render
from hyimg_cli.report.pictures import embedded, heat_map, missing

HOSTILE = '<img src=x onerror=alert(1)> & "quoted" {{ 7 * 7 }} </script>'


def pictures(height: int = 48, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    a = np.random.default_rng(0).integers(0, 240, (height, width, 3), dtype=np.uint8)
    return a, a + np.uint8(9)


def bench_like_page(text: str = "invented") -> Page:
    """Every kind of block, as a bench would use them. All numbers are invented."""
    a, b = pictures()
    before, after = embedded(a, f"A: {text}"), embedded(b, f"B: {text}")
    seconds = {"think": (1.5, 1.52), "denoise_rest": (5.0, 7.5), "total": (7.5, 10.5)}
    rows = [Bar(p, (Span(x, x * 0.9, x * 1.1), Span(y))) for p, (x, y) in seconds.items()]
    return Page(
        title=f"Invented numbers: {text}",
        question=f"Does it change the pictures? {text}",
        verdict=Verdict("within floor", "good", (f"41.2 dB, floor 40.9 dB {text}",)),
        sections=(
            Section(
                "Time",
                (
                    Bars(
                        f"Invented: median of 5, whiskers from fastest to slowest {text}",
                        ("KV reuse", f"recompute {text}"),
                        (*rows, Bar("kv_handoff", (Span(0.01), None))),
                    ),
                ),
                intro=text,
            ),
            Section(
                "Pictures",
                (
                    Compare(text, before, after, heat_map(a, b), (("PSNR", "29.0 dB"),), text, "B"),
                    Gallery((before, missing(text, caption=text))),
                ),
            ),
            Section(
                "Precision budget",
                (
                    Table(
                        text,
                        ("comparison", "PSNR dB"),
                        (Row(("reuse twice", "inf")), Row((text, "12.4"), "bad")),
                    ),
                ),
            ),
            Section(
                "Jobs",
                (
                    Cards(
                        (
                            Card(
                                text,
                                (before,),
                                text,
                                ((text, text),),
                                (("seed", text),),
                                (("think", text),),
                                (text,),
                                "bad",
                            ),
                        )
                    ),
                ),
            ),
            Section("Environment", (Facts(((text, text),)), Commands((text,)), Text(text))),
        ),
        footer=text,
    )


class Tags(HTMLParser):
    """Tags and attributes of a page, and what was left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_for_nothing_outside() -> None:
    page = render(bench_like_page())
    tags = Tags(page)
    assert tags.open == []
    assert not {tag for tag, _ in tags.found} & {"link", "iframe", "object", "video"}
    for tag, attributes in tags.found:
        for name in ("src", "href", "srcset", "action", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes[name])
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    assert "default-src 'none'" in page


def test_every_text_is_escaped() -> None:
    page = render(bench_like_page(HOSTILE))
    assert page.count("onerror=alert(1)&gt;") > 20
    assert "<img src=x" not in page
    assert "49" not in re.sub(r"data:image/[^\"]+", "", page).split("<body>")[1].split("{{ 7")[0]
    plain = Tags(render(bench_like_page()))
    hostile = Tags(page)
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert hostile.open == []


def test_bars_share_one_scale_that_begins_at_zero() -> None:
    bars = Bars(
        "x", ("A", "B"), (Bar("p", (Span(2.0, 1.0, 4.0), None)), Bar("q", (Span(1.0),) * 2))
    )
    assert bars.top == 4.0
    assert [bars.percent(value) for value in (0.0, 1.0, 4.0)] == ["0.000%", "25.000%", "100.000%"]
    assert bars.text(Span(2.0, 1.0, 4.0)) == "2 s (1 to 4)"
    assert Bars("none", ("A",), ()).percent(1.0) == "0.000%"


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_the_page_and_moves_the_slider(tmp_path: Path) -> None:
    seen = seen_in(render(bench_like_page(HOSTILE)), tmp_path)
    assert seen["errors"] == []
    assert seen["requests"] == []
    assert not seen["sideways"]
    assert all(seen["pictures"])
    (slider,) = seen["sliders"]
    assert slider["shown"]
    assert slider["focused"]
    assert slider["pixels"] == 64
    assert slider["width"] == 256
    assert (slider["before"], slider["after"]) == (
        "inset(0px 50% 0px 0px)",
        "inset(0px 80% 0px 0px)",
    )
    longest, total = max(seen["bars"]), seen["bars"][5]
    assert longest == total
    assert seen["bars"][3] / longest == pytest.approx(7.5 / 10.5, abs=0.02)


@needs_browser
def test_a_browser_with_a_dark_theme_gets_a_dark_page(tmp_path: Path) -> None:
    dark = "--blink-settings=preferredColorScheme=0"
    light = seen_in(render(bench_like_page()), tmp_path)["background"]
    assert seen_in(render(bench_like_page()), tmp_path, dark)["background"] != light
