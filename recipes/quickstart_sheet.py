"""Lay the pictures of a quickstart run out on one sheet: source, arrow, result, prompt.

python recipes/quickstart_sheet.py runs/quickstart-… recipes/quickstart-result.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE, GAP, LABEL, COLUMNS = 128, 16, 34, 3
CELL = (2 * SIDE + 3 * GAP, SIDE + LABEL + GAP)


def main(run: Path, sheet: Path) -> None:
    """Write the sheet of the run's finished jobs, in the manifest's order."""
    jobs = _lines(run / "manifest.resolved.jsonl")
    results = {line["custom_id"]: line for line in _lines(run / "results.jsonl")}
    done = [job for job in jobs if results.get(job["custom_id"], {}).get("status") == "done"]
    rows = -(-len(done) // COLUMNS)
    picture = Image.new("RGB", (COLUMNS * CELL[0], rows * CELL[1] + GAP), "#f4f4f2")
    for number, job in enumerate(done):
        corner = (number % COLUMNS * CELL[0], number // COLUMNS * CELL[1] + GAP)
        outputs = results[job["custom_id"]]["outputs"]
        _cell(picture, corner, job, run / outputs[0]["path"])
    picture.save(sheet, optimize=True)


def _cell(sheet: Image.Image, corner: tuple[int, int], job: dict[str, Any], result: Path) -> None:
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    left, top = corner[0] + GAP, corner[1]
    at = left
    for path in job.get("images", []):
        _paste(sheet, Path(__file__).parent / "quickstart" / Path(path).name, (at, top))
        draw.text((at + SIDE + 5, top + SIDE // 2 - 8), ">", "#444444", font)
        at += SIDE + GAP
    _paste(sheet, result, (at, top))
    draw.text((left, top + SIDE + 6), job["prompt"], "#222222", font)


def _paste(sheet: Image.Image, path: Path, at: tuple[int, int]) -> None:
    with Image.open(path) as picture:
        sheet.paste(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS), at)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
