"""Scenes, prompts and edits that are kept out of training, to judge it.

Training never draws a held-out scene, neither as a result nor as a source, so it never sees a
prompt that means it. `heldout.json` was written before the training run.
"""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tiny_world.captions import Edit, Wish, random_edit, random_wish
from tiny_world.scenes import COLOURS, DEFAULTS, PLACES, SHAPES, SIZES, Scene, random_scene

FILE = Path(__file__).with_name("heldout.json")
_SEED = 20260
_SCENES = 400
_PROMPTS = 256
_EDITS = 256


@dataclass(frozen=True)
class HeldOut:
    """Held-out tasks. Prompts mean one of the `scenes`, and edits lead to one."""

    scenes: frozenset[Scene]
    prompts: tuple[Wish, ...]
    edits: tuple[Edit, ...]


@cache
def held_out() -> HeldOut:
    """Return the committed lists."""
    lists = json.loads(FILE.read_text(encoding="utf-8"))
    return HeldOut(
        scenes=frozenset(Scene(**scene) for scene in lists["scenes"]),
        prompts=tuple(_wish(entry) for entry in lists["prompts"]),
        edits=tuple(_edit(entry) for entry in lists["edits"]),
    )


def is_held_out(scene: Scene) -> bool:
    """Return True if training must not draw this scene."""
    return scene in held_out().scenes


def trainable_scene(rng: random.Random) -> Scene:
    """Return a random scene that training may draw."""
    while is_held_out(scene := random_scene(rng)):
        pass
    return scene


def chosen(seed: int = _SEED) -> HeldOut:
    """Make the lists again from their seed, as `heldout.json` was made."""
    rng = random.Random(seed)
    scenes: dict[Scene, None] = {}
    while len(scenes) < _SCENES:
        scenes[random_scene(rng)] = None
    return HeldOut(
        frozenset(scenes),
        tuple(_prompts(list(scenes), rng)),
        tuple(_edits(list(scenes), rng)),
    )


def write(lists: HeldOut, file: Path) -> None:
    """Write the lists as JSON, one entry a line."""
    order = sorted(lists.scenes, key=_rank)
    parts = {
        "scenes": [asdict(scene) for scene in order],
        "prompts": [asdict(wish) for wish in lists.prompts],
        "edits": [asdict(edit) for edit in lists.edits],
    }
    blocks = [
        f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for name, entries in parts.items()
    ]
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def _prompts(scenes: list[Scene], rng: random.Random) -> list[Wish]:
    """Return prompts that state a shape and a colour, so that they mean one scene."""
    wishes: dict[str, Wish] = {}
    while len(wishes) < _PROMPTS:
        wish = random_wish(rng, rng.choice(scenes))
        if "colour" in wish.said:
            wishes.setdefault(wish.text, wish)
    return list(wishes.values())


def _edits(scenes: list[Scene], rng: random.Random) -> list[Edit]:
    """Return one-step edits from any scene to a held-out one, kinds as frequent as by chance."""
    kept = frozenset(scenes)
    edits: dict[Edit, None] = {}
    while len(edits) < _EDITS:
        edit = random_edit(rng, random_scene(rng), kinds=1)
        if edit.target in kept:
            edits[edit] = None
    return list(edits)


def _wish(entry: dict[str, object]) -> Wish:
    return Wish(str(entry["text"]), tuple(entry["said"]), Scene(**entry["scene"]))  # type: ignore


def _edit(entry: dict[str, object]) -> Edit:
    source, target = Scene(**entry["source"]), Scene(**entry["target"])  # type: ignore
    return Edit(str(entry["text"]), tuple(entry["facts"]), source, target)  # type: ignore


def _rank(scene: Scene) -> tuple[int, ...]:
    return (
        SHAPES.index(scene.shape),
        COLOURS.index(scene.colour),
        COLOURS.index(scene.background),
        list(PLACES).index(scene.place),
        list(SIZES).index(scene.size),
    )


def ordinary_prompts() -> tuple[Wish, ...]:
    """Return the plainest prompt of every large, centred shape on every background.

    Such as `a red circle on a blue background`. These must work, whether their wording is held out
    or not.
    """
    return tuple(
        Wish(
            f"a {colour} {shape} on a {background} background".replace("a orange", "an orange"),
            ("shape", "colour", "background"),
            Scene(shape, colour, background, DEFAULTS["place"], DEFAULTS["size"]),
        )
        for shape in SHAPES
        for colour in COLOURS
        for background in COLOURS
        if colour != background
    )


def main() -> None:
    write(chosen(), FILE)


if __name__ == "__main__":
    main()
