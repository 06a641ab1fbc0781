"""Loose wordings, for training only, by people who have not read the templates.

Separate from `captions.py`, so that the held-out lists made with it stay unchanged.
"""

import random

from tiny_world.captions import Edit, Wish, said_facts
from tiny_world.scenes import Scene

_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "red", "crimson", "scarlet", "bright red", "dark red"),
    "orange": ("orange", "orange", "tangerine"),
    "yellow": ("yellow", "yellow", "golden", "gold", "bright yellow"),
    "green": ("green", "green", "emerald", "dark green", "bright green"),
    "blue": ("blue", "blue", "navy", "dark blue", "royal blue"),
    "purple": ("purple", "violet", "lilac"),
    "pink": ("pink", "pink", "rose", "light pink"),
    "white": ("white", "white", "snow white"),
    "black": ("black", "black", "pitch black"),
    "grey": ("grey", "gray", "silver"),
    "circle": ("circle", "disc", "disk", "ball", "dot", "round shape"),
    "square": ("square", "box", "square shape"),
    "triangle": ("triangle", "triangle shape"),
    "diamond": ("diamond", "rhombus", "diamond shape"),
    "star": ("star", "five-pointed star", "star shape"),
    "heart": ("heart", "love heart", "heart shape"),
    "small": ("small", "little", "tiny", "very small", "mini", "really small"),
    "large": ("large", "big", "huge", "very large", "giant", "really big"),
    "centre": ("in the centre", "in the center", "in the middle", "centered"),
    "left": ("on the left", "to the left", "in the left", "at the left side", "left"),
    "right": ("on the right", "to the right", "in the right", "to the right side", "right"),
    "top": ("at the top", "in the top", "at the very top", "on top", "up top"),
    "bottom": ("at the bottom", "in the bottom", "at the very bottom", "down below"),
}
_OPENINGS = (
    "", "", "", "", "", "", "i'd love ", "i'd like ", "could you draw ", "give me ", "i need ",
    "let me see ", "how about ", "please make ", "please draw me ", "draw ", "just ", "show ",
    "can i have ", "paint me ", "render ", "a simple drawing of ", "picture of ", "image of ",
)  # fmt: skip
_ENDINGS = ("", "", "", "", "", " please", ", please", " for me", " thanks", ", thank you")
_DIRECTIONS = {"left": "left", "right": "right", "top": "up", "bottom": "down"}


def free_wish(rng: random.Random, scene: Scene) -> Wish:
    """Return a loosely worded prompt that means `scene`."""
    said = said_facts(scene, rng)
    noun = _noun(scene, said, rng)
    place = f" {_word(scene.place, rng)}" if "place" in said else ""
    background = _word(scene.background, rng)
    if "background" not in said:
        forms = [f"{noun}{place}"]
    else:
        forms = [
            f"{background} background with {noun}{place}",
            f"{background} background, {noun}{place}",
            f"on a {background} background, {noun}{place}",
            f"{noun}{place}, {background} background",
            f"{noun}{place} on {background}",
            f"{noun}{place} on a {background} background",
            f"{noun} on a {background} background{place}",
            f"{noun}{place} of a {background} background" if place else f"{noun} on {background}",
        ]
    return Wish(_typed(rng.choice(_OPENINGS) + rng.choice(forms), rng), said, scene)


def free_edit(rng: random.Random, edit: Edit) -> Edit:
    """Return the same edit, loosely worded; some pairs of changes have their own wording."""
    new = {fact: _word(getattr(edit.target, fact), rng) for fact in edit.facts}
    it = rng.choice(("it", "it", "this", f"the {_word(edit.source.shape, rng)}", "the shape"))
    if set(edit.facts) == {"colour", "shape"}:
        text = f"{rng.choice(('make', 'turn'))} {it} into a {new['colour']} {new['shape']}"
        text = text if rng.random() < 0.4 else f"make {it} a {new['colour']} {new['shape']}"
    elif set(edit.facts) == {"place", "background"} and rng.random() < 0.5:
        text = f"put {it} {new['place']} on a {new['background']} background"
    else:
        parts = [_change(fact, new[fact], it, edit.target, rng) for fact in edit.facts]
        text = rng.choice((" and ", ", ", " and then ")).join(parts)
    opening = rng.choice(("", "", "", "could you ", "please ", "i want you to ", "just "))
    return Edit(_typed(opening + text, rng), edit.facts, edit.source, edit.target)


def _change(fact: str, new: str, it: str, target: Scene, rng: random.Random) -> str:
    forms: dict[str, list[str]] = {
        "colour": [f"make {it} {new}", f"{it} should be {new}", f"change {it} to {new}", f"{new}"],
        "shape": [f"make {it} a {new}", f"{it} should be a {new}", f"change it for a {new}", new],
        "background": [
            f"{new} background", f"i'd like a {new} background", f"background {new}",
            f"the background should be {new}", f"change background to {new}", f"put {it} on {new}",
        ],
        "place": [
            f"move {it} {new}", f"put {it} {new}", f"{it} should be {new}", f"place {it} {new}",
        ],
        "size": [f"make {it} {new}", f"{it} should be {new}"],
    }  # fmt: skip
    options = forms[fact]
    if fact == "place" and target.place in _DIRECTIONS:
        way = _DIRECTIONS[target.place]
        options += [f"move {it} {way}", f"shift {it} {way}", f"{way}"]
    if fact == "size":
        more = "bigger" if target.size == "large" else "smaller"
        options += [more, f"make {it} {more}", f"a bit {more}", f"{it} should be {more}"]
    return rng.choice(options)


def _noun(scene: Scene, said: tuple[str, ...], rng: random.Random) -> str:
    article = rng.choice(("a ", "a ", "a ", "", "", "the ", "one "))
    size = f"{_word(scene.size, rng)} " if "size" in said else ""
    shape, colour = _word(scene.shape, rng), _word(scene.colour, rng)
    if "colour" not in said:
        return f"{article}{size}{shape}"
    if rng.random() < 0.2:
        return f"{article}{size}{shape} " + rng.choice((f"that is {colour}", f"in {colour}"))
    return f"{article}{size}{colour} {shape}"


def _word(value: str, rng: random.Random) -> str:
    return rng.choice(_WORDS[value])


def _typed(text: str, rng: random.Random) -> str:
    text = " ".join(text.split())
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}")
    text += rng.choice(_ENDINGS)
    roll = rng.random()
    if roll < 0.08:
        return text.upper()
    text = text[0].upper() + text[1:] if roll < 0.5 else text
    return text + rng.choice(("", "", "", ".", "!"))
