"""Show a simulated edit of recipes/photo/coffee.jpg on one sheet.

The sheet has source, redraw, result, and where each differs from the source.

No model draws here. The coffee is recoloured; then the picture is softened, shifted and drifted in
colour as a model's redraw is (tests/simulated_edits.py), and put back as by `--keep-outside`.

python recipes/photo_sheet.py recipes/photo-edit.jpg
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated_edits import Pixels, bucket, fitted, redrawn

from hyimg_cli.finishing.outside import edit_of, put_back
from hyimg_cli.finishing.placement import Placement, mapped_back

RECIPES = Path(__file__).parent
SIZE, GAP, LABEL = (300, 200), 12, 22


def main(sheet: Path) -> None:
    """Write the sheet; print what differs."""
    source = np.array(Image.open(RECIPES / "photo" / "coffee.jpg").convert("RGB"))
    size = bucket(source.shape[:2], 0.4e6)
    reference = fitted(source, size)
    drawn = redrawn(fitted(recoloured(source), size), np.random.default_rng(3))
    place = Placement.stretched(source.shape[:2], size)
    edit = edit_of(drawn, reference, place)
    result = put_back(source, drawn, reference, edit)
    redraw = mapped_back(drawn, place, (0, source.shape[0]), (0, source.shape[1]))
    outside = result.matte == 0
    differ = (result.pixels != source).any(2)[outside].sum()
    print(f"{edit.kind}: {differ} of {outside.sum()} pixels outside the edit differ")
    rows = [
        [
            ("source", source),
            ("redraw (simulated)", redraw),
            ("result of --keep-outside", result.pixels),
        ],
        [
            ("the edit that was found", result.matte),
            ("redraw - source, x8", _apart(redraw, source)),
            ("result - source, x8", _apart(result.pixels, source)),
        ],
    ]
    _lay_out(rows).save(sheet, quality=88)


def recoloured(source: Pixels) -> Pixels:
    """Return the photo with green coffee in the cup."""
    hsv = np.array(Image.fromarray(source).convert("HSV"))
    y, x = np.mgrid[: source.shape[0], : source.shape[1]]
    inside = (np.hypot((x - 290) / 92, (y - 142) / 68) < 1) & (hsv[..., 1] > 90)
    alpha = ndimage.gaussian_filter(ndimage.binary_opening(inside, iterations=2).astype(float), 1.5)
    hsv[..., 0] = 70
    green = np.array(Image.fromarray(hsv, "HSV").convert("RGB")).astype(float)
    return np.round(source + (green - source) * alpha[..., None]).astype(np.uint8)


def _apart(one: Pixels, other: Pixels) -> Pixels:
    return np.clip(8 * np.abs(one.astype(int) - other), 0, 255).astype(np.uint8)


def _lay_out(rows: list[list[tuple[str, Pixels]]]) -> Image.Image:
    width, height = SIZE
    sheet = Image.new("RGB", (3 * (width + GAP) + GAP, 2 * (height + LABEL + GAP) + GAP), "#f4f4f2")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for line, row in enumerate(rows):
        for column, (label, pixels) in enumerate(row):
            at = GAP + column * (width + GAP), GAP + line * (height + LABEL + GAP)
            sheet.paste(Image.fromarray(pixels).resize(SIZE, Image.Resampling.LANCZOS), at)
            draw.text((at[0], at[1] + height + 3), label, "#222222", font)
    return sheet


if __name__ == "__main__":
    main(Path(sys.argv[1]))
