"""Prompts for films: plain wordings, some with facts left out, some without meaning here.

No motion means that the shape stands still.
"""

import random

from tiny_films.world import Scene

_VERBS = ("moves", "goes", "slides")
_BACKGROUNDS = ("", "", "", "on black", "on a black background", "on a dark background")
_QUOTED = ("go", "open", "hi", "stop", "A1")
_UNKNOWN = (
    "blurred", "blurry, low quality", "a small dog runs along a beach", "clouds over a hill",
    "a sign swings in the wind", "a street at night", "ugly", "a cat", "something", "noise, dirt",
    "waves on the sea", "two people talk", "a train leaves the station", "worst quality",
)  # fmt: skip
_QUOTED_SHARE = 0.05


def plain_prompt(scene: Scene) -> str:
    """Return the plainest full sentence: `a red circle moves left`."""
    motion = "stays still" if scene.motion == "still" else f"moves {scene.motion}"
    subject = f"{_article(scene.colour)} {scene.colour} {scene.shape}"
    return f"{subject} {motion}"


def random_prompt(rng: random.Random, scene: Scene) -> str:
    """Return a random prompt for `scene`, and for no other film."""
    subject = f"{scene.colour} {scene.shape}"
    is_before = scene.motion == "still" and rng.random() < 0.2
    if is_before:
        subject = f"still {subject}"
    article = rng.choice((_article(subject), "the", ""))
    quoted = f'that says "{rng.choice(_QUOTED)}"' if rng.random() < _QUOTED_SHARE else ""
    motion = "" if is_before else _motion(rng, scene.motion)
    parts = (article, subject, quoted, motion, rng.choice(_BACKGROUNDS))
    return " ".join(part for part in parts if part)


def partial_prompt(rng: random.Random, scene: Scene) -> str:
    """Return a prompt without colour or shape: what each word means on its own."""
    subject = rng.choice((f"a {scene.shape}", f"something {scene.colour}"))
    motion = "stays still" if scene.motion == "still" else f"moves {scene.motion}"
    return f"{subject} {motion}"


def unknown_prompt(rng: random.Random) -> str:
    """Return a text that says nothing about this world: any film answers it."""
    return rng.choice(_UNKNOWN)


def _motion(rng: random.Random, motion: str) -> str:
    if motion == "still":
        return rng.choice(("stays still", "stands still", "standing still", ""))
    where = motion
    if motion in ("left", "right"):
        where = rng.choice((motion, motion, f"to the {motion}"))
    return rng.choice((*(f"{verb} {where}" for verb in _VERBS), f"moving {where}"))


def _article(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"
