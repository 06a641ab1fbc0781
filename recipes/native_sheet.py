"""Show a simulated edit of a region of 12 megapixels on one sheet: drawn whole, and as a crop.

The source is a wall of photographs that scikit-image ships, in their own pixels. The coffee in one
of them is made green. No model draws here: the truth is softened, shifted and drifted in colour as
a model's redraw is (tests/simulated_edits.py), once as the whole picture and once as the crop that
`region_size native` draws, both of about one megapixel, and put back as by `--keep-outside`.

python recipes/native_sheet.py recipes/native-edit.jpg
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from photo_sheet import recoloured
from simulated_edits import Pixels, bucket, fitted, photograph, redrawn

from hyimg_cli.finishing.crops import Crop, crop_of
from hyimg_cli.finishing.outside import edit_of, put_back
from hyimg_cli.finishing.placement import Placement
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import Box

HEIGHT, WIDTH, DRAWN = 3000, 4000, 1024 * 1024
# Photographs of the wall, each at least as large as a frame, and the space between frames.
NAMES = ("coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "retina.jpg", "motorcycle_left.png")
FRAME, SPACE = (600, 400), (50, 20)
# The coffee that is edited, and the cup in it.
PLACE, CUP = (2, 3), (180, 60, 400, 225)
SHOWN, LABEL, GAP = (300, 225), 22, 12


def main(sheet: Path) -> None:
    """Write the sheet; print how near each way comes to the truth."""
    source, truth, region = _wall()
    given = np.zeros((HEIGHT, WIDTH), np.uint8)
    left, top, right, bottom = region
    given[top:bottom, left:right] = 255
    crop = crop_of(region, Size(HEIGHT, WIDTH), _sizes())
    assert crop is not None, "the region is a small part of the photograph"
    whole = Crop((0, 0, WIDTH, HEIGHT), Size(*bucket((HEIGHT, WIDTH), DRAWN)))
    results = [_edited(source, truth, given, way) for way in (whole, crop)]
    for name, way, result in zip(("whole", "native"), (whole, crop), results, strict=True):
        apart = (result.astype(float) - truth)[top:bottom, left:right]
        decibels = 10 * np.log10(255**2 / np.square(apart).mean())
        outside = int((result != source).any(2)[given == 0].sum())
        said = f"{name}: drawn at {1 / way.scale:.2f} drawn pixels per pixel, {decibels:.1f} dB"
        print(f"{said} in the region, {outside} of {(given == 0).sum():,} pixels outside differ")
    x, y = (left + right - SHOWN[0]) // 2, (top + bottom - SHOWN[1]) // 2
    shown = {"source, 100 %": source, "drawn whole": results[0], "drawn as a crop": results[1]}
    parts = {
        name: Image.fromarray(pixels[y : y + SHOWN[1], x : x + SHOWN[0]])
        for name, pixels in shown.items()
    }
    _lay_out(_framed(source, crop.box, region), parts).save(sheet, quality=85)


def _wall() -> tuple[Pixels, Pixels, Box]:
    """Return the source, the source as it should be edited, and the region of the edit."""
    rng = np.random.default_rng(1)
    source = np.full((HEIGHT, WIDTH, 3), 205, np.uint8)
    source += rng.integers(0, 9, (HEIGHT, WIDTH, 1), dtype=np.uint8)
    photographs = [photograph(name) for name in NAMES]
    coffee, truth, region = photographs[0][:400, :600], source, (0, 0, 0, 0)
    for row in range(HEIGHT // (FRAME[1] + SPACE[1])):
        for column in range(WIDTH // (FRAME[0] + SPACE[0])):
            x, y = (SPACE[n] + at * (FRAME[n] + SPACE[n]) for n, at in enumerate((column, row)))
            whole = photographs[int(rng.integers(len(photographs)))]
            at_y, at_x = (
                int(rng.integers(1 + n - m)) for n, m in zip(whole.shape, FRAME[::-1], strict=False)
            )
            part = whole[at_y : at_y + FRAME[1], at_x : at_x + FRAME[0]]
            if (row, column) == PLACE:
                part, region = coffee, (x + CUP[0], y + CUP[1], x + CUP[2], y + CUP[3])
            source[y : y + FRAME[1], x : x + FRAME[0]] = part
    truth = source.copy()
    x, y = region[0] - CUP[0], region[1] - CUP[1]
    truth[y : y + FRAME[1], x : x + FRAME[0]] = recoloured(coffee)
    return source, truth, region


def _sizes() -> list[Size]:
    """Return sizes of about one megapixel, as editors draw them."""
    sides = range(736, 1441, 32)
    return [Size(h, w) for h in sides for w in sides if abs(h * w / DRAWN - 1) < 0.03]


def _edited(source: Pixels, truth: Pixels, given: np.ndarray, way: Crop) -> Pixels:
    """Return the source with the edit on it, after it was drawn from the crop."""
    left, top, right, bottom = way.box
    drawn = (way.drawn.height, way.drawn.width)
    shown, wanted = (fitted(one[top:bottom, left:right], drawn) for one in (source, truth))
    redraw = redrawn(wanted, np.random.default_rng(3))
    place = Placement.cropped(source.shape[:2], way.box, drawn)
    edit = edit_of(redraw, shown, place, given=given)
    return put_back(source, redraw, shown, edit, given).pixels


def _framed(source: Pixels, *boxes: Box) -> Image.Image:
    """Return the source in the sheet's width, with the boxes framed."""
    width = 3 * SHOWN[0] + 2 * GAP
    image = Image.fromarray(source).resize(
        (width, width * HEIGHT // WIDTH), Image.Resampling.LANCZOS
    )
    draw = ImageDraw.Draw(image)
    for box in boxes:
        draw.rectangle([round(at * width / WIDTH) for at in box], outline="#ffffff", width=4)
        draw.rectangle([round(at * width / WIDTH) for at in box], outline="#d00000", width=2)
    return image


def _lay_out(wall: Image.Image, parts: dict[str, Image.Image]) -> Image.Image:
    height = wall.height + SHOWN[1] + 2 * LABEL + 3 * GAP
    sheet = Image.new("RGB", (wall.width + 2 * GAP, height), "#f4f4f2")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    sheet.paste(wall, (GAP, GAP))
    said = "the source, 12 megapixels: the crop that is drawn, and the region in it"
    draw.text((GAP, GAP + wall.height + 3), said, "#222222", font)
    y = GAP + wall.height + LABEL + GAP
    for n, (name, part) in enumerate(parts.items()):
        x = GAP + n * (SHOWN[0] + GAP)
        sheet.paste(part, (x, y))
        draw.text((x, y + SHOWN[1] + 3), name, "#222222", font)
    return sheet


if __name__ == "__main__":
    main(Path(sys.argv[1]))
