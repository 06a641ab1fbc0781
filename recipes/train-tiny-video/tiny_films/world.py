"""What a film of the small world shows: one shape of one colour that moves in one direction, on
black.

Colours, shapes and sizes are the picture world's.
"""

import random
from dataclasses import dataclass
from itertools import product

FRAMES = 9
FPS = 8

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "yellow", "green", "blue", "purple", "white")
BACKGROUND = "black"
# (down, right) of a whole film, as shares of how far a moving shape goes.
MOTIONS: dict[str, tuple[float, float]] = {
    "left": (0.0, -1.0),
    "right": (0.0, 1.0),
    "up": (-1.0, 0.0),
    "down": (1.0, 0.0),
    "still": (0.0, 0.0),
}
FACTS = ("shape", "colour", "motion")


@dataclass(frozen=True)
class Scene:
    """One film in words; every field is a word of the tables above."""

    shape: str
    colour: str
    motion: str


def all_scenes() -> tuple[Scene, ...]:
    """All 90, in the order of the tables."""
    return tuple(Scene(*words) for words in product(SHAPES, COLOURS, MOTIONS))


def is_held_out(scene: Scene) -> bool:
    """Whether training never draws it: of every shape and colour, one of the five motions.

    Any two of the three words still meet in training, so a held-out film is a new combination of
    known parts.
    """
    numbers = (
        SHAPES.index(scene.shape),
        2 * COLOURS.index(scene.colour),
        tuple(MOTIONS).index(scene.motion),
    )
    return sum(numbers) % 5 == 0


TRAINABLE = tuple(scene for scene in all_scenes() if not is_held_out(scene))
HELD_OUT = tuple(scene for scene in all_scenes() if is_held_out(scene))


def trainable_scene(rng: random.Random) -> Scene:
    """A random scene that training may draw."""
    return rng.choice(TRAINABLE)
