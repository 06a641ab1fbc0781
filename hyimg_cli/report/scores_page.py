"""The page of two scored runs: their comparison, and the pairs whose scores differ most."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyimg_cli.media.images import read_image
from hyimg_cli.report.comparison import embed_picture, heat_map
from hyimg_cli.report.page import render
from hyimg_cli.spec.units import counted


def scores_page(sections: Sequence[Mapping[str, Any]]) -> str:
    """Return the page; each section is a scorer's `record`, its `lines` and its `pairs`.

    A pair has `name`, `prompt`, `scores` and `files` of both runs.
    """
    told = [
        {"scorer": one["record"]["scorer"], "lines": one["lines"], "pairs": [*_pairs(one["pairs"])]}
        for one in sections
    ]
    records = [one["record"] for one in sections]
    runs = [records[0][side]["run"] for side in ("a", "b")]
    # What makes the page a warning stands before what it found.
    doubts = [said for one in records for said in _doubts(one)]
    verdict = {
        "name": "; ".join(f"{one['scorer']}: {one['verdict']}" for one in records),
        "exit_code": 1 if doubts else 0,
        "reasons": [*doubts, *(one["lines"][-1].strip() for one in sections)],
    }
    question = f"A: {runs[0]}, B: {runs[1]}"
    entry = {"name": "two scored runs", "question": question, "verdict": verdict}
    return render("scores.html", entry=entry, sections=told)


def _doubts(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a comparison has no single number, or depends on more than the pictures."""
    for side in ("a", "b"):
        if count := len(record[side]["missing"]):
            yield f"{counted(count, 'result')} of {side.upper()} without all scores"
    yield from record["warnings"]


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield pairs with their pictures; with different sizes there is no map of differences."""
    for pair in pairs:
        a, b = (read_image(file).pixels for file in pair["files"])
        scores = [f"{value:.2f}" for value in pair["scores"]]
        apart = f"{pair['scores'][0] - pair['scores'][1]:+.2f}"
        yield {
            "name": pair["name"],
            "facts": (
                ("prompt", pair["prompt"]),
                ("A", scores[0]),
                ("B", scores[1]),
                ("A - B", apart),
            ),
            "before": embed_picture(a, f"{pair['name']}, A"),
            "after": embed_picture(b, f"{pair['name']}, B"),
            "heat": heat_map(a, b) if a.shape == b.shape else None,
        }
