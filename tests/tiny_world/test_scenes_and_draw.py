"""Pictures show their scenes: drawn, judged, drawn again the same."""

import random
from dataclasses import replace

import pytest
import torch
from tiny_world.draw import jitter, no_jitter, render, to_bytes, to_unit
from tiny_world.judge import judge
from tiny_world.scenes import (
    COLOURS,
    FACTS,
    PALETTE,
    SHAPES,
    Scene,
    changed,
    is_drawable,
    random_scene,
)

EXAMPLE = Scene("circle", "red", "blue", "centre", "large")


def test_the_judge_reads_every_true_render() -> None:
    rng = random.Random(0)
    scenes = [random_scene(rng) for _ in range(300)]
    pictures = render(scenes, jitter(300, torch.Generator().manual_seed(0), tinted=True))
    wrong = [
        (scene, judge(picture))
        for scene, picture in zip(scenes, pictures, strict=True)
        if judge(picture).wrong(scene, FACTS)
    ]
    assert not wrong


@pytest.mark.parametrize("shape", SHAPES)
def test_the_judge_forgives_a_soft_outline(shape: str) -> None:
    scene = replace(EXAMPLE, shape=shape)
    picture = render([scene], no_jitter(1)).float()
    soft = torch.nn.functional.avg_pool2d(picture, 3, stride=1, padding=1, count_include_pad=False)
    assert judge(soft[0].round().to(torch.uint8)).wrong(scene, FACTS) == ()


@pytest.mark.parametrize(
    "picture",
    [
        torch.full((3, 64, 64), 200, dtype=torch.uint8),
        torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(1)).byte(),
    ],
    ids=["flat", "noise"],
)
def test_the_judge_accepts_neither_flat_colour_nor_noise(picture: torch.Tensor) -> None:
    assert judge(picture).wrong(EXAMPLE, FACTS) == FACTS


def test_a_half_drawn_shape_is_not_clean() -> None:
    picture = render([EXAMPLE], no_jitter(1))[0]
    picture[:, :32] = torch.tensor(PALETTE["blue"], dtype=torch.uint8)[:, None, None]
    assert not judge(picture).is_clean


def test_only_the_facts_asked_about_are_judged() -> None:
    verdict = judge(render([EXAMPLE], no_jitter(1))[0])
    wanted = replace(EXAMPLE, place="left", colour="green")
    assert verdict.wrong(wanted, ("shape", "colour")) == ("colour",)


def test_a_source_and_its_edit_share_their_jitter() -> None:
    shared = jitter(1, torch.Generator().manual_seed(2))
    before, after = (render([scene], shared) for scene in (EXAMPLE, replace(EXAMPLE, colour="red")))
    assert torch.equal(before, after)


def test_bytes_and_units_are_inverse() -> None:
    picture = render([EXAMPLE], no_jitter(1))
    assert torch.equal(to_bytes(to_unit(picture)), picture)


def test_every_random_scene_can_be_drawn_and_every_value_comes_up() -> None:
    rng = random.Random(3)
    scenes = [random_scene(rng) for _ in range(2000)]
    assert all(is_drawable(scene) for scene in scenes)
    assert {scene.colour for scene in scenes} == set(COLOURS)
    assert {scene.shape for scene in scenes} == set(SHAPES)


@pytest.mark.parametrize("fact", FACTS)
def test_a_change_touches_one_fact_and_stays_drawable(fact: str) -> None:
    rng = random.Random(4)
    for _ in range(50):
        scene = random_scene(rng)
        after = changed(scene, fact, rng)
        assert is_drawable(after)
        assert [f for f in FACTS if getattr(after, f) != getattr(scene, f)] == [fact]
