"""Draws the source pictures of quickstart.jsonl: one coloured shape on a plain background each.

Run from anywhere: `python recipes/draw_quickstart.py`. The pictures are kept in git; a test draws
them again and compares.
"""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent / "quickstart"
OVERSAMPLING = 4
# Colours and sizes of the embedded checkpoint's small world.
COLOURS = {
    "red": (214, 40, 40),
    "yellow": (250, 214, 60),
    "blue": (40, 90, 210),
    "white": (248, 248, 248),
}


@dataclass(frozen=True)
class Scene:
    """One shape in the middle; `radius` is a fraction of the shorter side."""

    shape: str
    colour: str
    background: str
    width: int
    height: int
    radius: float


SCENES = {
    "red-circle.png": Scene("circle", "red", "white", 128, 128, 15 / 64),
    "yellow-square.png": Scene("square", "yellow", "blue", 128, 128, 15 / 64),
}


def draw(scene: Scene) -> Image.Image:
    """Return the scene as RGB; edges are smoothed by drawing larger and reducing."""
    width, height = scene.width * OVERSAMPLING, scene.height * OVERSAMPLING
    large = Image.new("RGB", (width, height), COLOURS[scene.background])
    x, y = width / 2, height / 2
    r = scene.radius * min(width, height)
    box = (x - r, y - r, x + r - 1, y + r - 1)
    paint = ImageDraw.Draw(large)
    outline = paint.ellipse if scene.shape == "circle" else paint.rectangle
    outline(box, fill=COLOURS[scene.colour])
    return large.reduce(OVERSAMPLING)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        draw(scene).save(FOLDER / name)
        print(f"{name}: {scene.width}x{scene.height}")


if __name__ == "__main__":
    main()
