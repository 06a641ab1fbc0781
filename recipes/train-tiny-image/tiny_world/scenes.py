"""Scenes of the small world: one shape, its colour, place and size, and a background."""

import random
from dataclasses import dataclass, fields, replace

PICTURE_PX = 64

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (250, 214, 60),
    "green": (45, 155, 75),
    "blue": (40, 90, 210),
    "purple": (125, 60, 170),
    "pink": (245, 145, 195),
    "white": (248, 248, 248),
    "black": (22, 22, 22),
    "grey": (140, 140, 140),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart")

# Position of the shape's middle, in pixels from the picture's middle: (down, right).
PLACES: dict[str, tuple[float, float]] = {
    "centre": (0.0, 0.0),
    "left": (0.0, -14.0),
    "right": (0.0, 14.0),
    "top": (-14.0, 0.0),
    "bottom": (14.0, 0.0),
}
# Half the longer side of the shape's box, in pixels.
SIZES: dict[str, float] = {"small": 10.5, "large": 15.5}

# Values for facts that a prompt does not state; an unsaid colour is free.
DEFAULTS = {"background": "white", "place": "centre", "size": "large"}


@dataclass(frozen=True)
class Scene:
    """One picture in words; every field is a key of the tables above."""

    shape: str
    colour: str
    background: str
    place: str
    size: str


FACTS = tuple(field.name for field in fields(Scene))


def choices(fact: str) -> tuple[str, ...]:
    """Return all values that `fact` can have."""
    tables = {"shape": SHAPES, "place": tuple(PLACES), "size": tuple(SIZES)}
    return tables.get(fact, COLOURS)


def is_drawable(scene: Scene) -> bool:
    """Return True if the shape differs from its background."""
    return scene.colour != scene.background


def random_scene(rng: random.Random) -> Scene:
    """Return any drawable scene; defaults of place, size and background are more frequent."""
    background = "white" if rng.random() < 0.2 else rng.choice(COLOURS)
    return Scene(
        shape=rng.choice(SHAPES),
        colour=rng.choice([colour for colour in COLOURS if colour != background]),
        background=background,
        place="centre" if rng.random() < 0.3 else rng.choice(tuple(PLACES)),
        size="large" if rng.random() < 0.2 else rng.choice(tuple(SIZES)),
    )


def changed(scene: Scene, fact: str, rng: random.Random) -> Scene:
    """Return the scene with another value of `fact`, still drawable."""
    old = getattr(scene, fact)
    values = [value for value in choices(fact) if value != old]
    drawable = [value for value in values if is_drawable(replace(scene, **{fact: value}))]
    return replace(scene, **{fact: rng.choice(drawable)})
