"""Words: recaptions are read back, prompts say what they claim, edits lead to their target."""

import random
from pathlib import Path

import pytest
from tiny_world.captions import (
    is_consistent,
    random_edit,
    random_wish,
    recaption,
    scene_of,
    think_about,
    think_about_edit,
    unknown_wish,
)
from tiny_world.free_words import free_edit, free_wish
from tiny_world.heldout import FILE, chosen, held_out, is_held_out, ordinary_prompts, write
from tiny_world.pool import trainable_edit
from tiny_world.scenes import DEFAULTS, FACTS, Scene, random_scene


def test_a_recaption_states_its_scene() -> None:
    rng = random.Random(0)
    for scene in (random_scene(rng) for _ in range(300)):
        assert scene_of(recaption(scene)) == scene


@pytest.mark.parametrize("text", ["", "A red circle.", "A large red circle in the centre"])
def test_other_text_is_no_recaption(text: str) -> None:
    assert scene_of(text) is None


def test_what_a_prompt_leaves_unsaid_is_the_default_or_free() -> None:
    rng = random.Random(1)
    for wish in (random_wish(rng) for _ in range(500)):
        for fact in set(DEFAULTS) - set(wish.said):
            assert getattr(wish.scene, fact) == DEFAULTS[fact]
        assert "shape" in wish.said


def test_a_prompt_about_the_unknown_says_nothing() -> None:
    scene = Scene("star", "red", "white", "centre", "large")
    wish = unknown_wish(random.Random(2), scene)
    assert wish.said == ()
    assert "cannot" in think_about(wish)


def test_an_edit_changes_what_it_names() -> None:
    rng = random.Random(3)
    edits = [random_edit(rng, random_scene(rng)) for _ in range(500)]
    assert all(is_consistent(edit) for edit in edits)
    assert {edit.facts[0] for edit in edits} == set(FACTS)
    assert {len(edit.facts) for edit in edits} == {1, 2}


def test_thoughts_about_an_edit_tell_source_and_change() -> None:
    edit = random_edit(random.Random(4), Scene("circle", "red", "white", "left", "small"), kinds=1)
    thought = think_about_edit(edit)
    assert "a small red circle on the left" in thought
    assert getattr(edit.target, edit.facts[0]) in thought


def test_the_committed_lists_are_what_their_seed_gives() -> None:
    assert chosen() == held_out()


def test_writing_the_lists_gives_the_committed_file(tmp_path: Path) -> None:
    write(chosen(), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == FILE.read_bytes()


def test_training_meets_no_held_out_scene() -> None:
    rng = random.Random(5)
    edits = [trainable_edit(rng) for _ in range(1000)]
    assert not any(is_held_out(scene) for edit in edits for scene in (edit.source, edit.target))


def test_held_out_jobs_lead_to_held_out_scenes() -> None:
    lists = held_out()
    assert len(lists.prompts) >= 200
    assert len(lists.edits) >= 200
    assert all(is_held_out(wish.scene) for wish in lists.prompts)
    assert all(is_held_out(edit.target) for edit in lists.edits)


def test_ordinary_prompts_read_as_people_write_them() -> None:
    texts = [wish.text for wish in ordinary_prompts()]
    assert "a red circle on a blue background" in texts
    assert not [text for text in texts if " a orange" in text]


def test_loose_wordings_mean_the_same() -> None:
    rng = random.Random(6)
    for _ in range(300):
        scene = random_scene(rng)
        wish, edit = free_wish(rng, scene), random_edit(rng, scene)
        loose = free_edit(rng, edit)
        assert wish.scene == scene
        assert all(getattr(scene, f) == DEFAULTS[f] for f in set(DEFAULTS) - set(wish.said))
        assert (loose.facts, loose.source, loose.target) == (edit.facts, edit.source, edit.target)
        assert "  " not in wish.text + loose.text
