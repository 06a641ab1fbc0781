"""Pages are complete in themselves, escaped, and work in a browser."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report.browser import needs_browser, seen_in

from hyimg_cli.quality.metrics import SHARES
from hyimg_cli.report.comparison import comparison_page, markdown

HOSTILE = '<img src=x onerror=alert(1)> & "quoted" {{ 7 * 7 }} </script>'


def spread(median: float, low: float, high: float) -> dict[str, float]:
    return {"n": 5, "median": median, "min": low, "max": high}


def side(wall_s: float, denoise_s: float) -> dict[str, Any]:
    phases = {"denoise_rest": spread(denoise_s, denoise_s, denoise_s), "prewarm": spread(0, 0, 0)}
    wall = spread(wall_s, wall_s - 1, wall_s + 2)
    rows = {"prefill": 100, "denoise": 200}
    return {"wall_s": wall, "s_per_job": wall_s, "phases_s": phases, "rows": rows}


def bench_entry(text: str = "invented") -> dict[str, Any]:
    """A bench.json with a text in every place of one. All numbers are invented."""
    figures = dict.fromkeys(SHARES, 0.5)
    one = {"psnr": 29.0, "ssim": None, "lpips": None, "max_abs": 9, **figures}
    worst = {"psnr_min": 29.0, "ssim_min": None, "lpips_max": None, "max_abs": 9, **figures}
    row = {"missing": [], "pictures": 1, **worst}
    variant = {"lifetime": "session", "settings": {"kv_reuse": text}}
    return {
        "name": text,
        "question": f"Does it change the pictures? {text}",
        "date": "today",
        "verdict": {"name": f"equal {text}", "exit_code": 0, "reasons": [text]},
        "variants": {"a": {"label": text, **variant}, "b": {"label": "B", **variant}},
        "common": {},
        "phases_that_may_differ": [text, "*"],
        "main_steps": 8,
        "timings": [
            {
                "steps": 8,
                "pair": [text, "B"],
                "a": side(6.0, 2.0),
                "b": side(8.0, 4.0),
                "speedup": {"median": 1.3, "low": 1.2, "high": 1.4, "coverage": 0.9},
                "is_resolved": True,
                "notes": [text],
                "gain_s": 2.0,
                "explained_s": 2.0,
            }
        ],
        "precision": [
            {"name": f"{text} vs B, 8 steps", "by_job": {"job": one}, **row},
            {"name": text, "by_job": {}, "pictures": 0, "missing": [text]},
        ],
        "jobs": [{"custom_id": "job", "prompt": text}],
        "notes": [text],
        "lpips": text,
        "environment": {
            "hardware": {"cpu": text, "cores": 2, "system": text, "gpus": [text]},
            "versions": {text: text},
            "model": text,
            "model_fingerprint": "f" * 64,
        },
        "command": text,
    }


def bench_page(folder: Path, text: str = "invented") -> str:
    """The page of that bench: a job whose pictures are 9 levels apart, and one of two sizes."""
    a = np.random.default_rng(0).integers(0, 240, (48, 64, 3), dtype=np.uint8)
    files = {name: folder / f"{name}.png" for name in ("a", "b", "small")}
    for path, pixels in zip(files.values(), (a, a + np.uint8(9), a[:8]), strict=True):
        Image.fromarray(pixels).save(path)
    pairs = {"job": (files["a"], files["b"]), text: (files["a"], files["small"])}
    return comparison_page(bench_entry(text), (text, "B"), pairs)


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


def test_a_page_is_well_formed_and_asks_for_nothing_outside(tmp_path: Path) -> None:
    page = bench_page(tmp_path)
    assert page.startswith("<!doctype html>")
    tags = Tags(page)
    assert tags.open == []
    assert not {tag for tag, _ in tags.found} & {"link", "iframe", "object", "video"}
    for tag, attributes in tags.found:
        for name in ("src", "href", "srcset", "action", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes[name])
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    assert "default-src 'none'" in page


def test_every_text_is_escaped(tmp_path: Path) -> None:
    page = bench_page(tmp_path, HOSTILE)
    assert page.count("onerror=alert(1)&gt;") > 20
    assert "<img src=x" not in page
    assert "49" not in re.sub(r"data:image/[^\"]+", "", page).split("<body>")[1].split("{{ 7")[0]
    plain = Tags(bench_page(tmp_path))
    hostile = Tags(page)
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert hostile.open == []


def test_bars_share_one_scale_that_begins_at_zero(tmp_path: Path) -> None:
    """The longest whisker ends at 10 s: the slowest run of B."""
    page = bench_page(tmp_path)
    bars = re.findall(r'class="bar series-\d" style="width:([0-9.]+%)"', page)
    assert bars == ["60.000%", "80.000%", "20.000%", "40.000%"]
    assert 'style="left:50.000%;width:30.000%"' in page
    assert "6 s (5 to 8)" in page
    assert "prewarm" not in page, "a phase without time has no bar"


def test_markdown_is_not_escaped_and_says_what_is_missing() -> None:
    text = markdown(bench_entry("<x> & y"))
    assert text.startswith("# <x> & y: equal <x> & y\n\nDoes it change the pictures? <x> & y\n")
    assert "| <x> & y | 8 | 6.000 | 100 | - | 200 | - |\n| B | 8 | 8.000 | 100 |" in text
    assert "| <x> & y over B | 8 | 1.300 | 1.200 to 1.400 | 2.000, of it 2.000 in phases" in text
    assert "| <x> & y vs B, 8 steps | 1 | 29.0 | - | - | 9 | 50.00% |" in text
    assert "| <x> & y | 0, nothing to compare: <x> & y |" in text


def test_one_run_has_no_range_and_small_times_have_plain_digits(tmp_path: Path) -> None:
    entry = bench_entry()
    timing = entry["timings"][0]
    timing["speedup"] |= {"low": 1.3, "high": 1.3, "coverage": 0.0}
    for side in (timing["a"], timing["b"]):
        side["wall_s"] |= {"n": 1}
        side["phases_s"]["denoise_rest"] = {
            "n": 1,
            **dict.fromkeys(("median", "min", "max"), 98e-6),
        }
    page, text = comparison_page(entry, ("A", "B"), {}), markdown(entry)
    for said in (page, text):
        assert "confidence" not in said
        assert "Medians" not in said
        assert "One run of each variant" in said
    assert "| 1.300 | - |" in text
    assert '<td class="value">0.000098 s</td>' in page
    assert "e-05" not in page


def test_a_clock_that_resolves_nothing_gives_no_speed_up(tmp_path: Path) -> None:
    entry = bench_entry()
    entry["timings"][0] |= {"is_resolved": False}
    assert "over B | 8 | not resolved | 1.200 to 1.400 |" in markdown(entry)
    assert '<td class="right">not resolved</td>' in comparison_page(entry, ("A", "B"), {})
    assert "not resolved" not in bench_page(tmp_path)


@needs_browser
def test_a_browser_shows_the_page_and_moves_the_slider(tmp_path: Path) -> None:
    seen = seen_in(bench_page(tmp_path, HOSTILE), tmp_path)
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
    longest, whole_run = max(seen["bars"]), seen["bars"][1]
    assert longest == whole_run
    assert seen["bars"][3] / longest == pytest.approx(4 / 8, abs=0.02)


@needs_browser
def test_a_browser_with_a_dark_theme_gets_a_dark_page(tmp_path: Path) -> None:
    dark = "--blink-settings=preferredColorScheme=0"
    light = seen_in(bench_page(tmp_path), tmp_path)["background"]
    assert seen_in(bench_page(tmp_path), tmp_path, dark)["background"] != light
