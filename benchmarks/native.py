"""Measure edits of a region: drawn with the whole photograph, against drawn as a crop of it.

Photographs that scikit-image ships, enlarged to 12 megapixels with texture of their own, edited in
a place and redrawn at random (`tests/simulated_edits.py`: the truth is known), at a million pixels.
All sides are halved to save time, which leaves as many source pixels per drawn pixel. No real model
is used. A plain paste of the redrawn crop is measured, too: without registration, without colours.

    python benchmarks/native.py --seed 1 --cases 50 --out benchmarks/results/native-2core-cpu.json

The edits of other seeds that `--out` holds are kept, and counted.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from measured import keep
from PIL import Image
from scipy import ndimage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_edits import EDITS, PHOTOGRAPHS, Pixels, bucket, fitted, photograph, redrawn, vae

from hyimg_cli.finishing.crops import crop_of
from hyimg_cli.finishing.outside import edit_of, put_back
from hyimg_cli.finishing.placement import AxisMap, Placement, mapped_back
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import Box

_PHOTO, _AREA = (1500, 2000), 512**2
KINDS = ("recolour", "paste", "fill", "text", "relight")
SIZES = [Size(rows * 16, round(1024 / rows) * 16) for rows in range(23, 46)]
WAYS = ("whole", "crop", "pasted")


def main() -> None:
    """Measure, print the summary, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.out and given.out.exists():
        rows = json.loads(given.out.read_text())["cases"]
        rows = [row for row in rows if row["seed"] != given.seed]
    for number in range(given.cases):
        rows.append(_measured(given.seed, number))
        print(json.dumps(rows[-1]), flush=True)
    summary = {way: _summary(rows, way) for way in WAYS}
    found = {"what": __doc__.splitlines()[0], "edits": len(rows)} | summary
    print(json.dumps(found, indent=1))
    keep(given, found | {"cases": rows})


def _measured(seed: int, number: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, number])
    kind = KINDS[number % len(KINDS)]
    name = PHOTOGRAPHS[int(rng.integers(len(PHOTOGRAPHS)))]
    source = _large(photograph(name))
    truth, box = _edited(source, kind, rng)
    crop = crop_of(box, Size(*_PHOTO), SIZES)
    assert crop is not None, "the box is a small part"
    softness = float(rng.uniform(0.3, 0.9)), float(rng.uniform(0.8, 2.5)), int(rng.integers(70, 95))
    drawing = rng.integers(1 << 32)
    row: dict[str, Any] = {
        "seed": seed,
        "number": number,
        "edit": kind,
        "photograph": name,
        "box": box,
        "crop": crop.box,
        "drawn": str(crop.drawn),
        "scale": round(crop.scale, 3),
    }
    whole = (0, 0, _PHOTO[1], _PHOTO[0])
    for way, part, size in (
        ("whole", whole, bucket(_PHOTO, _AREA)),
        ("crop", crop.box, (crop.drawn.height, crop.drawn.width)),
    ):
        left, top, right, bottom = part
        shown, wanted = (fitted(one[top:bottom, left:right], size) for one in (source, truth))
        drawn = redrawn(vae(wanted, *softness), np.random.default_rng(drawing))
        place = _placed(part, size)
        row[way] = _finished(source, truth, drawn, vae(shown, *softness), place, box)
    left, top, right, bottom = box
    pasted = source.copy()
    pasted[top:bottom, left:right] = mapped_back(drawn, place, (top, bottom), (left, right))
    row["pasted"] = _quality(pasted, truth, box)
    return row


def _large(pixels: Pixels) -> Pixels:
    """Enlarge a photograph, and give it finer detail: its own, as strong as the detail there is."""
    size = _PHOTO[1], _PHOTO[0]
    levels = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)).astype(float)
    rows, columns = (
        np.pad(np.arange(n), (0, max(0, m - n)), mode="reflect")[:m]
        for n, m in zip(pixels.shape[:2], _PHOTO, strict=True)
    )
    own = pixels[rows[:, None], columns[None]].astype(float)
    fine = own - ndimage.gaussian_filter(own, (1.2, 1.2, 0))
    there = levels - ndimage.gaussian_filter(levels, (6, 6, 0))
    strength = [np.sqrt(ndimage.gaussian_filter(one**2, (12, 12, 0))) for one in (there, fine)]
    levels += fine * np.minimum(2, strength[0] / (strength[1] + 1)) * 0.7
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)


def _edited(source: Pixels, kind: str, rng: np.random.Generator) -> tuple[Pixels, Box]:
    """Edit a part of the photograph; return the box of what changed, one twentieth wider."""
    height, width = _PHOTO
    while True:
        side = np.exp(rng.uniform(np.log(0.1), np.log(0.7)))
        high, wide = int(height * side), int(width * side * rng.uniform(0.7, 1))
        top, left = (int(rng.integers(0, n - m)) for n, m in ((height, high), (width, wide)))
        truth = source.copy()
        part = np.s_[top : top + high, left : left + wide]
        truth[part] = EDITS[kind](source[part], rng)
        changed = (np.abs(truth.astype(int) - source) > 2).any(2)
        if changed.sum() < 400:
            continue
        y, x = (np.flatnonzero(changed.any(axis)) for axis in (1, 0))
        more = round(0.05 * max(np.ptp(y), np.ptp(x))) + 1
        box = x[0] - more, y[0] - more, x[-1] + 1 + more, y[-1] + 1 + more
        left, top, right, bottom = (int(value) for value in box)
        return truth, (max(0, left), max(0, top), min(width, right), min(height, bottom))


def _placed(part: Box, size: tuple[int, int]) -> Placement:
    left, top, right, bottom = part
    y, x = size[0] / (bottom - top), size[1] / (right - left)
    return Placement(
        AxisMap(_PHOTO[0], size[0], y, y * top), AxisMap(_PHOTO[1], size[1], x, x * left)
    )


def _finished(
    source: Pixels, truth: Pixels, drawn: Pixels, reference: Pixels, place: Placement, box: Box
) -> dict[str, Any]:
    """Finish as the command does, and measure the result."""
    given = np.zeros(_PHOTO, np.uint8)
    given[box[1] : box[3], box[0] : box[2]] = 255
    started = time.process_time()
    edit = edit_of(drawn, reference, place, given=given)
    result = put_back(source, drawn, reference, edit, given)
    seconds = time.process_time() - started
    outside = (given == 0) | (result.matte == 0)
    differing = int((result.pixels != source).any(2)[outside].sum())
    said = {"kind": edit.kind, "reasons": list(edit.reasons), "differing": differing}
    return said | _quality(result.pixels, truth, box) | {"processor_s": round(seconds, 2)}


def _quality(pixels: Pixels, truth: Pixels, box: Box) -> dict[str, float]:
    """Return the PSNR inside the box, and the part of its fine detail that is there, in place."""
    part = np.s_[box[1] : box[3], box[0] : box[2]]
    made, wanted = pixels[part].astype(float), truth[part].astype(float)
    psnr = 10 * np.log10(255**2 / max(1e-3, float(np.square(made - wanted).mean())))
    window = np.hanning(wanted.shape[0])[:, None] * np.hanning(wanted.shape[1])[None]
    spectra = [np.fft.fft2((one - one.mean()) * window) for one in (made.mean(2), wanted.mean(2))]
    axes = [np.fft.fftfreq(side) for side in wanted.shape[:2]]
    fine = np.hypot(axes[0][:, None], axes[1][None]) > 0.25
    shared = float((spectra[0] * spectra[1].conj()).real[fine].sum())
    detail = shared / float(np.square(np.abs(spectra[1][fine])).sum())
    return {"psnr": round(psnr, 2), "detail": round(detail, 3)}


def _summary(rows: list[dict[str, Any]], way: str) -> dict[str, Any]:
    found = [row[way] for row in rows]
    spread: dict[str, Any] = {
        name: {
            "median": round(float(np.median(values)), 3),
            "p10": round(float(np.quantile(values, 0.1)), 3),
            "p90": round(float(np.quantile(values, 0.9)), 3),
        }
        for name in ("psnr", "detail", "processor_s")
        if (values := [one[name] for one in found if name in one])
    }
    if "kind" in found[0]:
        spread["kinds"] = dict(Counter(one["kind"] for one in found))
        spread["with_reasons"] = sum(bool(one["reasons"]) for one in found)
        spread["differing"] = sum(one["differing"] for one in found)
    return spread


if __name__ == "__main__":
    main()
