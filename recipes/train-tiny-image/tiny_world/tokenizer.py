"""The tokenizer: a small byte-level BPE learnt from the captions, and official control tokens."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_world.captions import (
    random_edit,
    random_wish,
    recaption,
    think_about,
    think_about_edit,
)
from tiny_world.scenes import PICTURE_PX, random_scene

_TEXT_TOKENS = 640
_CAPTIONS = 20_000

# Ratio tokens 33 to 36 do not follow 0 to 32, as in the released tokenizer.
CONTROL_TOKENS = (
    "<|endoftext|>", "<|startoftext|>", "<boi>", "<eoi>", "<boa>", "<eoa>", "<bov>", "<eov>",
    "<img>", "<audio>", "<video>", "<pad>", "<cfg>", "<timestep>", "<timestep_r>", "<guidance>",
    "<joint_img_sep>", "<recaption>", "</recaption>", "<ref>", "</ref>", "<quad>", "</quad>",
    "<think>", "</think>", "<answer>", "</answer>", f"<img_size_{PICTURE_PX}>", "<img_size_1024>",
    *(f"<img_ratio_{k}>" for k in range(33)),
    *(f"<reserved_{k}>" for k in range(5)),
    *(f"<img_ratio_{k}>" for k in range(33, 37)),
)  # fmt: skip

_CONFIG = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<pad>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1048576,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def trained_tokenizer(*, seed: int = 3, captions: int = _CAPTIONS) -> Tokenizer:
    """Train a tokenizer on `captions` texts of the small world; equal for equal seeds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(random.Random(seed), captions), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as in a released checkpoint."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(_CONFIG, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _texts(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count // 6):
        wish, edit = random_wish(rng), random_edit(rng, random_scene(rng))
        yield from (wish.text, think_about(wish), recaption(wish.scene))
        yield from (edit.text, think_about_edit(edit), recaption(edit.target))
        yield from ("User: ", "Assistant: ", "\n\n")
