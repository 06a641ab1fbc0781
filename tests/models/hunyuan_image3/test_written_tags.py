"""Tags in a written text: only pairs are kept in the negative row, in texts as in their ids."""

from pathlib import Path

import pytest

from hyimg_cli.models.hunyuan_image3.config import Template
from hyimg_cli.models.hunyuan_image3.sequence import Section, sections_of_ids, sections_of_text
from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary

# Each with its parts, separated by |; the tags among them are kept.
TEXTS = {
    "<think>a</think><recaption>b</recaption>": "<think>|a|</think>|<recaption>|b|</recaption>",
    "<think>a</think>\n<recaption>b</recaption>": (
        "<think>|a|</think>|\n|<recaption>|b|</recaption>"
    ),
    "<recaption>a</think>b</recaption>": "<recaption>|a</think>b|</recaption>",
    "<recaption>a<think>b</recaption>": "<recaption>|a<think>b|</recaption>",
    "<think>a<recaption>b</think>": "<think>|a<recaption>b|</think>",
    "<think>a</recaption>b</think>": "<think>|a</recaption>b|</think>",
    # Reasoning is looked for first, so it takes the recaption around it apart.
    "<recaption>a<think>b</think>c</recaption>": "<recaption>a|<think>|b|</think>|c</recaption>",
    # A text without a pair is one part.
    "<think>a</recaption>": "<answer><think>a</recaption></answer>",
    "</think>a<think>": "<answer></think>a<think></answer>",
    "a": "<answer>a</answer>",
    # Nothing is lost around a repeated tag.
    "<think>a</think><recaption>b</think>c</recaption>": (
        "<think>|a|</think>|<recaption>|b</think>c|</recaption>"
    ),
    "<think>a<think>b</think>": "<think>|a<think>b|</think>",
    "<think>a</think>b<think>c</think>d": "<think>|a|</think>|b|<think>|c|</think>|d",
}
TAGS = {"<think>", "</think>", "<recaption>", "</recaption>"}


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    folder = Path(__file__).parents[2] / "parity" / "tiny" / "checkpoint"
    return Vocabulary.from_folder(folder, base_size=256, ratio_count=37)


@pytest.mark.parametrize("text", TEXTS)
def test_only_pairs_of_tags_are_kept_in_the_negative_row(words: Vocabulary, text: str) -> None:
    parts = [Section(tuple(words.encode(one)), one not in TAGS) for one in TEXTS[text].split("|")]
    assert sections_of_text(words, text, "instruct") == parts
    assert sections_of_ids(words, words.encode(text), "instruct") == parts


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("template", ["instruct", "pretrain"])
def test_a_text_and_its_ids_are_split_alike(
    words: Vocabulary, text: str, template: Template
) -> None:
    """With the reasoning or without it; the base model has no answer tags."""
    ids = words.encode(text)
    for drop_think in (False, True):
        found = sections_of_ids(words, ids, template, drop_think=drop_think)
        assert found == sections_of_text(words, text, template, drop_think=drop_think)
        if not drop_think and template == "pretrain":
            assert [id_ for one in found for id_ in one.ids] == ids


def test_reasoning_that_is_dropped_leaves_the_rest(words: Vocabulary) -> None:
    text = "<think>a</think>b<recaption>c</think>d</recaption>"
    found = sections_of_text(words, text, "instruct", drop_think=True)
    parts = ["b", "<recaption>", "c</think>d", "</recaption>"]
    assert [words.decode(one.ids) for one in found] == parts
