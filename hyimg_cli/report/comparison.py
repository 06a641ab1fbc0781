"""The report of a comparison: `bench.json` as a page with pictures and as Markdown.

Pixels are uint8 arrays [H, W, 3], RGB.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hyimg_cli.media.images import read_image
from hyimg_cli.quality.metrics import SHARES, Pixels, level_differences
from hyimg_cli.report.page import number, render

# The maximum number of pairs on a page, to keep it small; the folders A and B have them all.
_MOST_PAIRS = 12
# Maximum side in pixels of a picture on the page.
DISPLAY_SIDE = 768
# Smaller pictures are enlarged by a whole factor, up to this side in CSS pixels.
_ENLARGED_SIDE = 256
_SCALES = (1, 2, 5, 10, 20, 50, 100, 255)
# 33 evenly spaced colours of `inferno` (Smith and van der Walt, matplotlib, CC0). Linear
# interpolation in sRGB between them is at most 2 levels off the original 256.
_INFERNO = (
    "000004 040312 0b0724 150b37 210c4a 2f0a5b 3d0965 4a0c6b 57106e 64156e 71196e "
    "7d1e6d 8a226a 972766 a32c61 b0315b bc3754 c63d4d d04545 da4e3c e35933 eb6429 "
    "f1711f f67e14 f98c0a fb9b06 fcaa0f fbba1f f9c932 f5d949 f2e865 f3f586 fcffa4 "
)
_POINTS = np.frombuffer(bytes.fromhex(_INFERNO), dtype=np.uint8).reshape(-1, 3)
# The figures in a row of the precision budget, with their formats.
_FIGURES = {"psnr_min": ".1f", "ssim_min": ".4f", "lpips_max": ".4f", "max_abs": "d"}
_FIGURES |= dict.fromkeys(SHARES, ".2%")
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture in a page; `uri` contains the whole file.

    `width`, `height`: pixels in the file. `shown_width`: maximum width in CSS pixels; more than
    `width` if the picture is enlarged. `note`: how it was changed for the page.
    """

    uri: str
    alt: str
    width: int
    height: int
    shown_width: int
    note: str = ""


class HeatMap(NamedTuple):
    """A map of where two pictures differ.

    `top`: the difference in levels at the bright end of the scale. `largest`: the largest
    difference found. `legend`: the meaning of the colours. `gradient`: the colours from left to
    right, as a CSS value.
    """

    picture: EmbeddedPicture
    top: int
    largest: int
    legend: str
    gradient: str = f"linear-gradient(to right, #{', #'.join(_INFERNO.split())})"


def comparison_page(
    entry: Entry, shown: Sequence[str], pictures: Mapping[str, tuple[Path, Path]]
) -> str:
    """Return the page of a `bench.json`.

    `pictures`: by job, the files of the two variants in `shown`.
    """
    pairs = list(_pairs(entry, shown, pictures))
    count = len(pictures)
    return render("comparison.html", pairs=pairs, shown=shown, count=count, **_tables(entry))


def markdown(entry: Entry) -> str:
    """Return `bench.json` as Markdown text with tables."""
    return render("comparison.md", **_tables(entry))


def _tables(entry: Entry) -> dict[str, Any]:
    """Return the content that the page and the Markdown share, as rows of cells."""
    speedups = []
    # Each variant's seconds and rows, by step count.
    variants: dict[int, dict[str, Any]] = {}
    for timing in entry["timings"]:
        up = timing["speedup"]
        sides = dict(zip(timing["pair"], (timing["a"], timing["b"]), strict=True))
        variants.setdefault(timing["steps"], {}).update(sides)
        speedups.append(
            (
                " over ".join(timing["pair"]),
                str(timing["steps"]),
                f"{up['median']:.3f}" if timing["is_resolved"] else "not resolved",
                f"{up['low']:.3f} to {up['high']:.3f}" if timing["a"]["wall_s"]["n"] > 1 else "–",
                f"{timing['gain_s']:.3f}",
                f"{timing['explained_s']:.3f}",
            )
        )
    runs, phases = [], []
    for steps, sides in variants.items():
        for label, own in sides.items():
            rows = [str(own["rows"].get(stage, "–")) for stage in ("prefill", "text", "denoise")]
            slots = str(own.get("kv_slots") or "–")
            runs.append((label, str(steps), f"{own['s_per_job']:.3f}", *rows, slots))
        # The spread over all variants: for the whole run, then for each phase that took time.
        spreads = {"whole run": [own["wall_s"] for own in sides.values()]}
        for name in entry["timings"][0]["a"]["phases_s"]:
            spreads[name] = [own["phases_s"][name] for own in sides.values()]
        taken = [(name, of) for name, of in spreads.items() if max(one["max"] for one in of) > 0]
        phases.append((steps, list(sides), [(name, tuple(of)) for name, of in taken]))
    budget = []
    for row in entry["precision"]:
        figures = (number(row.get(name), form) for name, form in _FIGURES.items())
        budget.append((row["name"], str(row["pictures"]), *figures))
    return {"entry": entry, "speedups": speedups, "runs": runs, "phases": phases, "budget": budget}


def _pairs(
    entry: Entry, shown: Sequence[str], pictures: Mapping[str, tuple[Path, Path]]
) -> Iterator[dict[str, Any]]:
    """Yield the first pairs, with prompt and distances at the main step count.

    A pair with different sizes has no heat map.
    """
    a, b = shown
    row_name = f"{a} vs {b}, {entry['main_steps']} steps"
    distances: Entry = next(
        (row["by_job"] for row in entry["precision"] if row["name"] == row_name), {}
    )
    prompts = {job["custom_id"]: job["prompt"] for job in entry["jobs"]}
    for name, files in list(pictures.items())[:_MOST_PAIRS]:
        ours, theirs = (read_image(file).pixels for file in files)
        if ours.shape != theirs.shape:
            yield {"name": name, "heat": None}
            continue
        one = distances.get(name)
        facts = one and (
            ("prompt", prompts.get(name, "")),
            ("PSNR", f"{number(one['psnr'], '.1f')} dB"),
            ("SSIM", number(one["ssim"], ".4f")),
            ("LPIPS", number(one["lpips"], ".4f")),
            ("largest difference", f"{one['max_abs']} levels"),
            ("equal values", f"{one['equal_share']:.2%}"),
        )
        yield {
            "name": name,
            "before": embed_picture(ours, f"{name}, {a}"),
            "after": embed_picture(theirs, f"{name}, {b}"),
            "heat": heat_map(ours, theirs),
            "facts": facts,
        }


def embed_picture(pixels: Pixels, alt: str) -> EmbeddedPicture:
    """Return `pixels` for a page, scaled down (Lanczos) if they are larger than it shows."""
    image = Image.fromarray(pixels)
    image.thumbnail((DISPLAY_SIDE, DISPLAY_SIDE), Image.Resampling.LANCZOS)
    height, width, _ = pixels.shape
    is_whole = image.size == (width, height)
    return _encode(image, alt, "" if is_whole else f"scaled down from {width}x{height}")


def heat_map(a: Pixels, b: Pixels) -> HeatMap:
    """Map where `a` and `b` differ, in colours from 0 (dark) to `top` levels (bright).

    `top` is the first of 1, 2, 5, 10, … 255 that no difference exceeds. A large map shows the
    largest difference in each square, so no difference is lost. Raises UsageError if the sizes
    differ.
    """
    from skimage.measure import block_reduce

    levels = level_differences(a, b).max(axis=2)
    largest = int(levels.max())
    top = next(scale for scale in _SCALES if scale >= largest)
    step = -(-max(levels.shape) // DISPLAY_SIDE)
    dots = block_reduce(levels, step, np.max) if step > 1 else levels
    image = Image.fromarray(color_values(dots / top))
    picture = _encode(image, f"Difference map: largest {largest} levels")
    note = f"; each dot is the largest of {step}x{step} pixels" if step > 1 else ""
    legend = f"|A - B|, the largest of the three channels, from 0 to {top} levels of 255; "
    return HeatMap(picture, top, largest, f"{legend}largest found: {largest}{note}")


def color_values(values: NDArray[np.floating[Any]]) -> Pixels:
    """Return colours [H, W, 3] for values [H, W] from 0 (darkest) to 1.

    Equal steps look equally large. Values outside the range are clipped.
    """
    places = np.linspace(0, 1, len(_POINTS))
    channels = [np.interp(values, places, column) for column in _POINTS.T]
    return np.asarray(np.rint(np.stack(channels, axis=-1)), dtype=np.uint8)


def _encode(image: Image.Image, alt: str, note: str = "") -> EmbeddedPicture:
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    uri = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    # Enlarge by a whole number, so every pixel has the same size on the screen.
    factor = max(1, _ENLARGED_SIDE // max(image.size))
    return EmbeddedPicture(
        uri=uri,
        alt=alt,
        width=image.width,
        height=image.height,
        shown_width=image.width * factor,
        note=note,
    )
