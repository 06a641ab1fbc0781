"""Scenes of the films' small world: one shape of one colour that moves, on black.

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
# (down, right) over a whole film, as fractions of how far a moving shape goes.
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
    """Return all 90 scenes, in the order of the tables."""
    return tuple(Scene(*words) for words in product(SHAPES, COLOURS, MOTIONS))


def is_held_out(scene: Scene) -> bool:
    """Return True if training never draws it: one of five motions of every shape and colour.

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
    """Return a random scene that training may draw."""
    return rng.choice(TRAINABLE)
