"""Embed many prompts with the frozen text encoders, as the product does, without padding.

The product pads a conversation to 1108 tokens. The encoder is causal, so later tokens change
nothing; a test compares the two.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
    extract_glyph_texts,
    format_text_input,
)

from hyimg_cli.kernels.offload import Offload
from hyimg_cli.models.diffusers_video.encoders import (
    SKIPPED_LAYERS,
    TEMPLATE_TOKENS,
    TEXT,
    HunyuanPrompts,
)
from hyimg_cli.models.diffusers_video.layout import read_layout
from hyimg_cli.models.diffusers_video.record import HUNYUAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.weights import LoadTarget
from hyimg_cli.models.latent import PromptEmbedding
from tiny_films.captions import partial_prompt, random_prompt, unknown_prompt
from tiny_films.world import TRAINABLE, Scene

PLACE = LoadTarget(Offload(torch.device("cpu")), torch.float32)
_EMPTY_SHARE = 0.07
_UNKNOWN_SHARE = 0.03


class PromptEncoder:
    """The encoders of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self._prompts = HunyuanPrompts(read_layout(folder), PLACE, HUNYUAN_MAX_TOKENS)

    @torch.no_grad()
    def encode(self, text: str) -> PromptEmbedding:
        """Return what the product's encoder returns, with an empty key."""
        if extract_glyph_texts(text) is not None:
            return self._prompts.encode(text)
        encoders = self._prompts
        ids = encoders.tokenizer("tokenizer").apply_chat_template(
            format_text_input([text], self._prompts.system_message),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        states = encoders.network("text_encoder")(
            input_ids=ids["input_ids"], output_hidden_states=True
        ).hidden_states[-(SKIPPED_LAYERS + 1)]
        return PromptEmbedding("", {TEXT: states[0, TEMPLATE_TOKENS:]}, ())


@dataclass(frozen=True)
class PromptBank:
    """Embedded prompts: by scene, an empty one, and some without meaning."""

    by_scene: dict[Scene, tuple[PromptEmbedding, ...]]
    empty: PromptEmbedding
    unknown: tuple[PromptEmbedding, ...]

    def draw(self, rng: random.Random, scene: Scene) -> PromptEmbedding:
        """Return a prompt for a film of `scene`; sometimes none, for guidance's other branch."""
        chance = rng.random()
        if chance < _EMPTY_SHARE:
            return self.empty
        if chance < _EMPTY_SHARE + _UNKNOWN_SHARE:
            return rng.choice(self.unknown)
        return rng.choice(self.by_scene[scene])


def drawn_bank(encoder: PromptEncoder, *, wordings: int, seed: int) -> PromptBank:
    """Return wordings of every scene that training may draw; a quarter leave something open."""
    rng = random.Random(f"{seed}/prompts")
    encode = encoder.encode
    by_scene = {
        scene: tuple(
            encode(partial_prompt(rng, scene) if n % 4 == 3 else random_prompt(rng, scene))
            for n in range(wordings)
        )
        for scene in TRAINABLE
    }
    unknown = tuple(encode(unknown_prompt(rng)) for _ in range(40))
    return PromptBank(by_scene, encode(""), unknown)


def encoded(encoder: PromptEncoder, texts: Sequence[str]) -> list[PromptEmbedding]:
    """Return prompts in order."""
    return [encoder.encode(text) for text in texts]
