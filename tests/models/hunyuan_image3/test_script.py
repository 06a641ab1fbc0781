"""The AR stage's rules: transitions, stops, the ending that the token limit forces."""

from pathlib import Path
from typing import Any

import pytest

from hyimg_cli.models.hunyuan_image3.script import Script, trigger
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    folder = Path(__file__).parents[2] / "parity" / "tiny" / "checkpoint"
    return Vocabulary.from_folder(folder, base_size=256, ratio_count=37)


def _played(script: Script, free: list[int], start: int) -> list[int]:
    """What is written when `free` tokens are sampled in turn and restricted ones take the first."""
    written, waiting = [start], list(free)
    while not script.is_done(written[-1]):
        allowed = script.allowed(written[-1])
        written.append(allowed[0] if allowed else waiting.pop(0))
    assert not waiting
    return written


def test_think_recaption_with_ratio(words: Vocabulary) -> None:
    script = Script(words, "think_recaption", True, "instruct", words.ratios[3:5])
    written = _played(script, [70, words.end_think, 71, words.end_recaption], start=words.think)
    assert written == [
        words.think, 70, words.end_think, words.recaption, 71, words.end_recaption,
        words.answer, words.boi, words.img_size, words.ratios[3],
    ]  # fmt: skip
    assert script.text_of(written) == written[:6]


@pytest.mark.parametrize("needs_ratio", [True, False])
def test_the_base_model_thinks_up_to_the_end_of_its_recaption(
    words: Vocabulary, needs_ratio: bool
) -> None:
    """Its own code samples on behind `</think>`, a line break and the next tag among others."""
    script = Script(words, "think", needs_ratio, "pretrain", words.ratios, is_base=True)
    free = [70, words.end_think, 13, words.recaption, 71, words.end_recaption]
    written = _played(script, free, start=words.think)
    assert script.text_of(written) == [words.think, *free]


def test_pretrain_template_has_no_answer_tag(words: Vocabulary) -> None:
    script = Script(words, "recaption", True, "pretrain", words.ratios)
    written = _played(script, [70, words.end_recaption], start=words.recaption)
    assert written[2:] == [words.end_recaption, words.boi, words.img_size, words.ratios[0]]


@pytest.mark.parametrize("bot_task", ["think", "recaption", "think_recaption"])
def test_a_given_size_stops_at_the_closing_tag(words: Vocabulary, bot_task: Any) -> None:
    script = Script(words, bot_task, False, "instruct", words.ratios)
    assert script.is_done(script.end)
    assert not script.is_done(70)
    # Upstream stops plain `think` at either tag, the other tasks at </recaption> alone.
    assert script.is_done(words.end_think) == (bot_task == "think")
    assert script.is_done(words.end_recaption)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("<answer>", None),
        ("<boi>", None),
        ("<img_size_256>", None),
        ("<img_size_1024>", None),
        ("<img_ratio_7>", 7),
        ("<img_ratio_35>", 35),
        ("<img_ratio_2>", None),
    ],
)
def test_what_opens_a_picture_ends_the_text(words: Vocabulary, name: str, ratio: int) -> None:
    """A ratio token is the size, unless the checkpoint's card leaves it out."""
    script = Script(words, "recaption", True, "instruct", words.ratios[3:])
    (id_,) = words.encode(name)
    assert script.early_end(id_) == f"the text ended early at {name}, before </recaption>"
    written = script.forced_ending([words.recaption, 70], before=id_)
    assert written == [words.recaption, 70, words.end_recaption]
    last = words.ratios[3:] if ratio is None else (words.ratios[ratio],)
    behind = [script.allowed(written[-1]) for _ in range(4)]
    assert behind == [(words.answer,), (words.boi,), (words.img_size,), last]


@pytest.mark.parametrize(
    "name", ["</answer>", "<|endoftext|>", "<img>", "<think>", "</think>", "<recaption>"]
)
def test_other_control_tokens_end_nothing(words: Vocabulary, name: str) -> None:
    script = Script(words, "recaption", True, "instruct", words.ratios)
    assert script.early_end(*words.encode(name)) == ""


@pytest.mark.parametrize("name", ["</answer>", "<|endoftext|>", "<boi>", "<img_ratio_7>"])
def test_what_ends_a_text_of_the_base_model(words: Vocabulary, name: str) -> None:
    script = Script(words, "recaption", True, "pretrain", words.ratios, is_base=True)
    (id_,) = words.encode(name)
    assert script.early_end(id_) == f"the text ended early at {name}, before </recaption>"
    assert script.forced_ending([words.recaption, 70], before=id_)[2:] == [words.end_recaption]
    behind = [script.allowed(words.end_recaption) for _ in range(3)]
    assert behind == [(words.boi,), (words.img_size,), words.ratios]
    assert script.early_end(words.img) == ""


@pytest.mark.parametrize("needs_ratio", [True, False])
def test_endings_at_the_token_limit(words: Vocabulary, needs_ratio: bool) -> None:
    think, end_think = words.think, words.end_think
    recaption, end_recaption = words.recaption, words.end_recaption
    cases = {
        (think, 70): [think, 70, end_think],
        (think, 70, end_think): [think, 70, end_think],
        (think, 70, end_think, recaption): [think, 70, end_think],
        (think, 70, end_think, recaption, 71): [think, 70, end_think, recaption, 71, end_recaption],
        # A tag that closes nothing leaves the last open one open.
        (think, end_think, recaption, 71, end_think): [
            think, end_think, recaption, 71, end_think, end_recaption,
        ],
        (think, 70, recaption, end_think): [think, 70, recaption, end_think, end_recaption],
    }  # fmt: skip
    for written, ended in cases.items():
        script = Script(words, "think_recaption", needs_ratio, "instruct", words.ratios)
        assert script.forced_ending(list(written)) == ended
        if needs_ratio:
            behind = [script.allowed(ended[-1]) for _ in range(4)]
            assert behind == [(words.answer,), (words.boi,), (words.img_size,), words.ratios]
            assert script.is_done(words.ratios[0])


def test_triggers() -> None:
    assert [trigger(t) for t in ("none", "think", "recaption", "think_recaption")] == [
        "", "<think>", "<recaption>", "<think>",
    ]  # fmt: skip
