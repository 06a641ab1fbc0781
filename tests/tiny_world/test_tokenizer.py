"""The tokenizer: official control tokens by name, whole words, any text."""

import pytest
from tiny_world.captions import recaption
from tiny_world.scenes import PICTURE_PX, Scene
from tiny_world.tokenizer import CONTROL_TOKENS, trained_tokenizer
from tokenizers import Tokenizer

from hyimg_cli.models.hunyuan_image3.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer()


def test_every_control_token_is_one_id(tokenizer: Tokenizer) -> None:
    for token in CONTROL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


def test_the_last_ratio_tokens_do_not_follow_the_first(tokenizer: Tokenizer) -> None:
    ratios = Vocabulary(tokenizer, base_size=PICTURE_PX, ratio_count=37).ratios
    assert list(ratios[:33]) == list(range(ratios[0], ratios[0] + 33))
    assert ratios[33] > ratios[32] + 1


@pytest.mark.parametrize("text", ["a red circle", "\n\n", "Hällo 日本 🎨", "<think>x</think>", ""])
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_recaption_takes_a_token_a_word(tokenizer: Tokenizer) -> None:
    scene = Scene("diamond", "yellow", "purple", "bottom", "small")
    assert len(tokenizer.encode(recaption(scene)).ids) <= 16
