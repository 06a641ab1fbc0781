"""Films show their scenes: drawn, described, judged; held-out ones are new combinations only."""

import random
from dataclasses import replace

import pytest
import torch
from tiny_films.captions import plain_prompt, random_prompt
from tiny_films.draw import jitter, no_jitter, paths, render, to_bytes
from tiny_films.judge import judge
from tiny_films.world import (
    COLOURS,
    FACTS,
    HELD_OUT,
    MOTIONS,
    SHAPES,
    TRAINABLE,
    Scene,
    all_scenes,
    trainable_scene,
)

EXAMPLE = Scene("circle", "red", "left")


def film(scene: Scene) -> torch.Tensor:
    return to_bytes(render([scene], no_jitter(1))[0])


@pytest.mark.thorough
def test_the_judge_reads_every_true_render() -> None:
    scenes = all_scenes()
    films = render(scenes, jitter(len(scenes), torch.Generator().manual_seed(0), is_tinted=True))
    wrong = [
        scene for scene, f in zip(scenes, films, strict=True) if judge(to_bytes(f)).wrong(scene)
    ]
    assert (len(scenes), wrong) == (90, [])


@pytest.mark.parametrize("motion", MOTIONS)
def test_every_motion_is_told_from_the_others(motion: str) -> None:
    drawn = film(replace(EXAMPLE, motion=motion))
    for other in MOTIONS:
        wrong = judge(drawn).wrong(replace(EXAMPLE, motion=other))
        assert wrong == (() if other == motion else ("motion",))


def test_a_film_backwards_moves_the_other_way() -> None:
    assert judge(film(EXAMPLE).flip(0)).wrong(EXAMPLE) == ("motion",)


def test_another_shape_or_colour_is_seen() -> None:
    drawn = film(EXAMPLE)
    assert judge(drawn).wrong(replace(EXAMPLE, shape="square")) == ("shape",)
    assert judge(drawn).wrong(replace(EXAMPLE, colour="blue")) == ("colour",)


@pytest.mark.parametrize("kind", ["flat", "noise", "jumping", "torn", "on white"])
def test_what_is_no_film_of_this_world_is_wrong_in_everything(kind: str) -> None:
    drawn = film(EXAMPLE)
    noise = torch.randint(0, 256, drawn.shape, generator=torch.Generator().manual_seed(1)).byte()
    torn = drawn.clone()
    torn[2:6, :, 26:38] = 22
    made = {
        "flat": torch.full_like(drawn, 22),
        "noise": noise,
        "jumping": drawn[[0, 8, 0, 8, 0, 8, 0, 8, 8]],
        "torn": torn,
        "on white": torch.where(drawn == 22, torch.tensor(248, dtype=torch.uint8), drawn),
    }
    assert judge(made[kind]).wrong(EXAMPLE) == FACTS


def test_a_stretch_is_a_part_of_the_film() -> None:
    scenes = [EXAMPLE, Scene("square", "blue", "down")]
    whole = render(scenes, no_jitter(2))
    assert torch.equal(render(scenes, no_jitter(2), slice(2, 5)), whole[:, :, 2:5])


def test_paths_stay_inside_the_picture() -> None:
    scenes = all_scenes()
    extreme = replace(no_jitter(len(scenes)), shift_B2=torch.ones(len(scenes), 2))
    assert paths(scenes, extreme).abs().amax() + 11.2 < 32


def test_held_out_scenes_are_new_combinations_of_known_parts() -> None:
    assert (len(HELD_OUT), len(TRAINABLE)) == (18, 72)
    for names, tables in (
        (("shape", "colour"), (SHAPES, COLOURS)),
        (("shape", "motion"), (SHAPES, MOTIONS)),
        (("colour", "motion"), (COLOURS, MOTIONS)),
    ):
        seen = {tuple(getattr(scene, name) for name in names) for scene in TRAINABLE}
        assert len(seen) == len(tables[0]) * len(tables[1]), names
    rng = random.Random(0)
    assert not {trainable_scene(rng) for _ in range(2000)} & set(HELD_OUT)


def test_no_prompt_means_two_scenes() -> None:
    rng = random.Random(0)
    meant: dict[str, Scene] = {}
    for scene in all_scenes():
        for prompt in (plain_prompt(scene), *(random_prompt(rng, scene) for _ in range(60))):
            assert meant.setdefault(prompt, scene) == scene
    assert len(meant) > 2000
