"""A comparison to look at: what `bench.json` says, as a page with pictures and as Markdown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyimg_cli.media.images import read_image
from hyimg_cli.quality.metrics import SHARES
from hyimg_cli.report.page import number, render
from hyimg_cli.report.pictures import embed_picture, heat_map

# More pairs than this make a page heavy; the folders A and B hold them all.
_MOST_PAIRS = 12
Entry = Mapping[str, Any]


def comparison_page(entry: Entry, pictures: Mapping[str, tuple[Path, Path]]) -> str:
    """The page of a `bench.json`; `pictures` by job: the files of variant A and of variant B."""
    verdict = entry["verdict"]
    return render(
        "comparison.html",
        title=f"hyimg bench: {entry['name']}",
        question=entry["question"],
        verdict=verdict["name"],
        tone="bad" if verdict["exit_code"] else "good",
        reasons=verdict["reasons"],
        pairs=list(_pairs(entry, pictures)),
        count=len(pictures),
        **_tables(entry),
    )


def markdown(entry: Entry) -> str:
    """`bench.json` as text with tables."""
    return render("comparison.md", **_tables(entry))


def _tables(entry: Entry) -> dict[str, Any]:
    """Content of both forms: rows of cells."""
    return {
        "entry": entry,
        "labels": _labels(entry),
        "speedups": [_speedup(timing) for timing in entry["timings"]],
        "phases": [_bars(timing) for timing in entry["timings"]],
        "budget": [_budget(row) for row in entry["precision"]],
    }


def _labels(entry: Entry) -> tuple[str, str]:
    return entry["variants"]["a"]["label"], entry["variants"]["b"]["label"]


def _speedup(timing: Entry) -> tuple[str, ...]:
    up = timing["speedup"]
    return (
        str(timing["steps"]),
        *(f"{timing[side]['s_per_job']:.3f}" for side in ("a", "b")),
        f"{up['median']:.3f}" if timing["is_resolved"] else "not resolved",
        f"{up['low']:.3f} to {up['high']:.3f}",
        f"{timing['gain_s']:.3f}",
        f"{timing['explained_s']:.3f}",
    )


def _budget(row: Entry) -> tuple[str, ...]:
    if not row["pictures"]:
        return (row["name"], "0", *("–",) * (4 + len(SHARES)))
    return (
        row["name"],
        str(row["pictures"]),
        number(row["psnr_min"], ".1f"),
        number(row["ssim_min"], ".4f"),
        number(row["lpips_max"], ".4f"),
        str(row["max_abs"]),
        *(f"{row[name]:.2%}" for name in SHARES),
    )


def _bars(timing: Entry) -> list[tuple[str, tuple[Entry, Entry]]]:
    """The spread of both variants: of the whole run, then of each phase that took any time."""
    a, b = timing["a"], timing["b"]
    phases = [(phase, (a["phases_s"][phase], b["phases_s"][phase])) for phase in a["phases_s"]]
    taken = [(name, both) for name, both in phases if max(one["max"] for one in both) > 0]
    return [("whole run", (a["wall_s"], b["wall_s"])), *taken]


def _pairs(entry: Entry, pictures: Mapping[str, tuple[Path, Path]]) -> Iterator[dict[str, Any]]:
    """The first pairs with prompt and distances; one of two sizes has no difference to show."""
    a, b = _labels(entry)
    facts = _facts_by_job(entry)
    for name, files in list(pictures.items())[:_MOST_PAIRS]:
        ours, theirs = (read_image(file).pixels for file in files)
        if ours.shape != theirs.shape:
            yield {"name": name, "heat": None}
            continue
        yield {
            "name": name,
            "before": embed_picture(ours, f"{name}, {a}"),
            "after": embed_picture(theirs, f"{name}, {b}"),
            "heat": heat_map(ours, theirs),
            "facts": facts.get(name, ()),
        }


def _facts_by_job(entry: Entry) -> dict[str, tuple[tuple[str, str], ...]]:
    """Prompt and distances of each job at the main step count."""
    name = f"{' vs '.join(_labels(entry))}, {entry['main_steps']} steps"
    row: Entry = next((row for row in entry["precision"] if row["name"] == name), {"by_job": {}})
    prompts = {job["custom_id"]: job["prompt"] for job in entry["jobs"]}
    return {
        job: (
            ("prompt", prompts.get(job, "")),
            ("PSNR", f"{number(one['psnr'], '.1f')} dB"),
            ("SSIM", number(one["ssim"], ".4f")),
            ("LPIPS", number(one["lpips"], ".4f")),
            ("largest difference", f"{one['max_abs']} levels"),
            ("equal values", f"{one['equal_share']:.2%}"),
        )
        for job, one in row["by_job"].items()
    }
