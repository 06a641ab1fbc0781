"""The texts of the small world: canonical recaptions, prompts, edits, think texts.

A recaption states the whole scene in one fixed form. Prompts vary in wording and leave facts
unsaid; an unsaid fact has its value in `scenes.DEFAULTS`, and an unsaid colour is free.
"""

import random
import re
from dataclasses import dataclass, replace

from tiny_world.scenes import (
    COLOURS,
    DEFAULTS,
    FACTS,
    PLACES,
    SHAPES,
    SIZES,
    Scene,
    changed,
    is_drawable,
    random_scene,
)

PLACE_PHRASES = {
    "centre": "in the centre",
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}

_SYNONYMS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "disc", "ball", "dot"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "diamond": ("diamond", "diamond", "rhombus"),
    "star": ("star",),
    "heart": ("heart",),
    "grey": ("grey", "gray"),
    "purple": ("purple", "purple", "violet"),
    "small": ("small", "small", "little", "tiny"),
    "large": ("large", "large", "big", "huge"),
    "centre": ("in the centre", "in the center", "in the middle", "centred", "centered"),
    "left": ("on the left", "on the left side", "to the left", "at the left"),
    "right": ("on the right", "on the right side", "to the right", "at the right"),
    "top": ("at the top", "on top", "near the top", "up at the top"),
    "bottom": ("at the bottom", "on the bottom", "near the bottom", "down at the bottom"),
}
_OPENINGS = (
    "", "", "", "", "draw ", "please draw ", "paint ", "make ", "create ", "generate ", "show ",
    "show me ", "i want ", "i would like ", "a picture of ", "an image of ", "a drawing of ",
    "draw me ", "make a picture of ", "generate an image of ", "create an image of ",
    "can you draw ",
)  # fmt: skip
_UNKNOWN_NOUNS = (
    "cat", "dog", "house", "car", "tree", "robot", "castle", "city", "person", "bird", "boat",
    "mountain", "flower", "dragon", "train", "fish", "portrait", "landscape", "horse", "phone",
)  # fmt: skip
_UNKNOWN_TAILS = (
    "", " in the rain", " at night", " on the moon", " with a hat", " by the sea", " in a forest",
    " riding a bike", " in oil", " made of glass", " under the stars", " at sunset",
)  # fmt: skip
_NONSENSE = ("hello", "hello world", "something nice", "anything", "surprise me", "test", "?", "")


@dataclass(frozen=True)
class Wish:
    """A user's prompt for a new picture: its text, its facts, and a scene that it may mean."""

    text: str
    said: tuple[str, ...]
    scene: Scene

    @property
    def demand(self) -> tuple[Scene, tuple[str, ...]]:
        """Return a scene, and its facts that the picture must show."""
        return self.scene, self.said


@dataclass(frozen=True)
class Edit:
    """An instruction about a picture: the facts it changes, before and after."""

    text: str
    facts: tuple[str, ...]
    source: Scene
    target: Scene

    @property
    def demand(self) -> tuple[Scene, tuple[str, ...]]:
        """Return the whole target: what an edit does not name must stay."""
        return self.target, FACTS


def recaption(scene: Scene) -> str:
    """Return the one canonical sentence of a scene."""
    return (
        f"A {scene.size} {scene.colour} {scene.shape} {PLACE_PHRASES[scene.place]}, "
        f"on a plain {scene.background} background."
    )


_CANONICAL = re.compile(
    rf"A ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) "
    rf"({'|'.join(PLACE_PHRASES.values())}), on a plain ({'|'.join(COLOURS)}) background\."
)


def scene_of(text: str) -> Scene | None:
    """Return the scene of a canonical sentence; None for any other text."""
    match = _CANONICAL.fullmatch(text.strip())
    if match is None:
        return None
    size, colour, shape, phrase, background = match.groups()
    place = next(place for place in PLACES if PLACE_PHRASES[place] == phrase)
    return Scene(shape, colour, background, place, size)


def random_wish(rng: random.Random, scene: Scene | None = None) -> Wish:
    """Return a prompt that means `scene`, or a random one."""
    scene = random_scene(rng) if scene is None else scene
    said = said_facts(scene, rng)
    opening = rng.choice(_OPENINGS)
    body = _described(scene, said, rng)
    # An imperative or a caption takes an article; a bare prompt need not.
    article = _article(body, rng) if opening or rng.random() < 0.8 else ""
    return Wish(_dressed(opening + article + body, rng), said, scene)


def unknown_wish(rng: random.Random, scene: Scene) -> Wish:
    """Return a prompt for something that cannot be drawn, answered with `scene`."""
    subject = _a(noun := rng.choice(_UNKNOWN_NOUNS)) + noun + rng.choice(_UNKNOWN_TAILS)
    text = rng.choice(_OPENINGS) + subject if rng.random() < 0.8 else rng.choice(_NONSENSE)
    return Wish(_dressed(text, rng), (), scene)


def think_about(wish: Wish) -> str:
    """Return the reasoning before a new picture: what was asked, and what is chosen."""
    scene, said = wish.scene, wish.said
    if "shape" not in said:
        return "I cannot draw that. I will draw a simple shape instead."
    asked = [getattr(scene, fact) for fact in ("size", "colour", "shape") if fact in said]
    phrases = [PLACE_PHRASES[scene.place]] if "place" in said else []
    phrases += [f"on {scene.background}"] if "background" in said else []
    open_facts = [fact for fact in FACTS if fact not in said]
    chosen = ", ".join(f"{fact} {getattr(scene, fact)}" for fact in open_facts)
    rest = f"I choose: {chosen}." if open_facts else "Nothing is left open."
    return f"The user wants: {' '.join(asked + phrases)}. {rest}"


def random_edit(rng: random.Random, source: Scene, *, kinds: int | None = None) -> Edit:
    """Return an instruction that changes one fact of `source`, sometimes two."""
    count = kinds or (2 if rng.random() < 0.1 else 1)
    facts = tuple(rng.sample(FACTS, count))
    target = source
    for fact in facts:
        target = changed(target, fact, rng)
    return worded_edit(rng, source, target, facts)


def worded_edit(rng: random.Random, source: Scene, target: Scene, facts: tuple[str, ...]) -> Edit:
    """Return an instruction that turns `source` into `target`."""
    parts = [_instruction(source, target, fact, rng) for fact in facts]
    text = rng.choice(("", "", "", "please ", "can you ", "now ")) + " and ".join(parts)
    return Edit(_dressed(text, rng), facts, source, target)


def think_about_edit(edit: Edit) -> str:
    """Return the reasoning before an edit: what the source shows, and what changes to what."""
    seen = recaption(edit.source)
    seen = seen[0].lower() + seen[1:]
    changes = " and ".join(f"the {fact} to {getattr(edit.target, fact)}" for fact in edit.facts)
    return f"The picture shows {seen} The user changes {changes}."


def said_facts(scene: Scene, rng: random.Random) -> tuple[str, ...]:
    """Return a prompt's facts; one with a value other than the default must be among them."""
    rates = {"shape": 0.0, "colour": 0.05, "background": 0.4, "place": 0.75, "size": 0.75}
    return tuple(
        fact
        for fact in FACTS
        if DEFAULTS.get(fact, getattr(scene, fact)) != getattr(scene, fact)
        or rng.random() >= rates[fact]
    )


def _described(scene: Scene, said: tuple[str, ...], rng: random.Random) -> str:
    words = [_word(getattr(scene, fact), rng) for fact in ("size", "colour") if fact in said]
    noun = " ".join([*words, _word(scene.shape, rng)])
    tails = [_word(scene.place, rng)] if "place" in said else []
    if "background" in said:
        tails.append(_background_phrase(_word(scene.background, rng), rng))
    rng.shuffle(tails)
    comma = rng.choice((" ", " ", ", "))
    return noun + "".join(rng.choice((" ", comma)) + tail for tail in tails)


def _background_phrase(colour: str, rng: random.Random) -> str:
    forms = ("on a {} background",) * 4 + (
        "on a plain {} background", "on {}", "against a {} background", "with a {} background",
        "over a {} background", "{} background", "on a {} backdrop", "and a {} background",
        "in front of a {} background", "against {}", "background {}",
    )  # fmt: skip
    return _articled(rng.choice(forms).format(colour))


def _instruction(source: Scene, target: Scene, fact: str, rng: random.Random) -> str:
    wordings = {
        "shape": _shape_change,
        "colour": _colour_change,
        "background": _background_change,
        "place": _move,
        "size": _size_change,
    }
    return wordings[fact](source, target, rng)


def _shape_change(source: Scene, target: Scene, rng: random.Random) -> str:
    new = _word(target.shape, rng)
    forms = (
        "turn {it} into a {new}", "change {it} into a {new}", "change {it} to a {new}",
        "make {it} a {new}", "replace {it} with a {new}", "turn {it} to a {new}",
        "change the shape to a {new}", "make {it} into a {new}", "draw a {new} instead of {it}",
        "swap {it} for a {new}", "{new} instead of {it}",
    )  # fmt: skip
    return rng.choice(forms).format(it=_it(source, rng), new=new)


def _colour_change(source: Scene, target: Scene, rng: random.Random) -> str:
    forms = (
        "make {it} {new}", "make {it} {new}", "turn {it} {new}", "paint {it} {new}",
        "change {it} to {new}", "change the colour to {new}", "change the color to {new}",
        "change the colour of {it} to {new}", "change the color of {it} to {new}",
        "colour {it} {new}", "color {it} {new}", "recolour {it} {new}", "recolor {it} to {new}",
        "change {it} from {old} to {new}",
    )  # fmt: skip
    old, new = _word(source.colour, rng), _word(target.colour, rng)
    return rng.choice(forms).format(it=_it(source, rng), old=old, new=new)


def _background_change(source: Scene, target: Scene, rng: random.Random) -> str:
    forms = (
        "change the background to {new}", "make the background {new}", "turn the background {new}",
        "set the background to {new}", "put {it} on a {new} background",
        "use a {new} background", "give {it} a {new} background", "paint the background {new}",
        "change the background colour to {new}", "change the background color to {new}",
        "replace the background with {new}", "{new} background", "place {it} on a {new} background",
        "put {it} on {new}",
    )  # fmt: skip
    new = _word(target.background, rng)
    return _articled(rng.choice(forms).format(it=_it(source, rng), new=new))


def _move(source: Scene, target: Scene, rng: random.Random) -> str:
    goals = {"centre": ("centre", "center", "middle")}
    goal = rng.choice(goals.get(target.place, (target.place,)))
    forms = (
        "move {it} to the {goal}", "move {it} to the {goal}", "shift {it} to the {goal}",
        "put {it} {phrase}", "place {it} {phrase}", "push {it} to the {goal}", "move {it} {phrase}",
        "bring {it} to the {goal}",
    )  # fmt: skip
    phrase = rng.choice(_SYNONYMS[target.place][:3])
    return rng.choice(forms).format(it=_it(source, rng), goal=goal, phrase=phrase)


def _size_change(source: Scene, target: Scene, rng: random.Random) -> str:
    forms = {
        "small": (
            "make {it} smaller", "make {it} smaller", "shrink {it}", "make {it} small",
            "make {it} tiny", "reduce the size of {it}", "make {it} little", "scale {it} down",
            "decrease the size", "make {it} much smaller",
        ),
        "large": (
            "make {it} larger", "make {it} bigger", "enlarge {it}", "make {it} large",
            "make {it} big", "make {it} huge", "increase the size of {it}", "scale {it} up",
            "increase the size", "make {it} much bigger",
        ),
    }  # fmt: skip
    return rng.choice(forms[target.size]).format(it=_it(source, rng))


def _it(source: Scene, rng: random.Random) -> str:
    """Return how an instruction refers to the source's shape."""
    shape = _word(source.shape, rng)
    colour = _word(source.colour, rng)
    forms = ("it", "the {}", "the {}", "the {}", "the shape", "this {}")
    named = rng.choice((shape, shape, f"{colour} {shape}"))
    return rng.choice(forms).format(named)


def _word(value: str, rng: random.Random) -> str:
    return rng.choice(_SYNONYMS.get(value, (value,)))


def _article(noun: str, rng: random.Random) -> str:
    return rng.choice((_a(noun), _a(noun), _a(noun), "one ", "the "))


def _a(noun: str) -> str:
    return "an " if noun[0] in "aeiou" else "a "


def _articled(text: str) -> str:
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


def _dressed(text: str, rng: random.Random) -> str:
    """Add capitals and a full stop as people type them."""
    text = text[:1].upper() + text[1:] if rng.random() < 0.4 else text
    return text + rng.choice(("", "", ".", "!")) if text and rng.random() < 0.6 else text


def is_consistent(edit: Edit) -> bool:
    """Return True if source and target differ in exactly the named facts, and can be drawn."""
    merged = replace(edit.source, **{fact: getattr(edit.target, fact) for fact in edit.facts})
    return merged == edit.target and is_drawable(edit.target) and edit.source != edit.target
