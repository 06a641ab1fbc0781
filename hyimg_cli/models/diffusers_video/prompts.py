"""The text encoders: HunyuanVideo-1.5's two, Qwen2.5-VL for the prompt and ByT5 for what it quotes,
and Wan's UMT5, always 512 rows for the transformer, only the valid ones kept.

Cleaning and encoding are diffusers' own, called one string at a time under no_grad: with gradients
another attention kernel is picked, and other bits come out.
"""

# Legend: N tokens of the main stream, M glyph tokens, W width
import inspect
from functools import cached_property
from typing import Any

import torch
from diffusers import HunyuanVideo15Pipeline, WanPipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
    extract_glyph_texts,
    format_text_input,
)
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor

from hyimg_cli.errors import installed_version
from hyimg_cli.models.diffusers_video.card import HUNYUAN_MAX_TOKENS, WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.encoders import CheckpointEncoder, cut_note
from hyimg_cli.models.latent_video import PromptEmbedding

TEXT, GLYPH = "text", "glyph"
MAX_GLYPH_TOKENS = 256
TEMPLATE_TOKENS = 108
SKIPPED_LAYERS = 2


class HunyuanPrompts(CheckpointEncoder):
    """The checkpoint's `PromptEncoder`: `text` [N, W] always, `glyph` [M, W] for quoted text."""

    tensors = {TEXT: True, GLYPH: False}
    max_tokens = HUNYUAN_MAX_TOKENS

    @cached_property
    def system_message(self) -> str:
        """The library's own, spaces and all: the template's 108 tokens count on it."""
        signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
        return str(signature.parameters["system_message"].default)

    def key(self, text: str) -> str:
        """By the exact string: nothing of it is stripped."""
        glyph = [*self.identity("text_encoder_2", "tokenizer_2"), MAX_GLYPH_TOKENS]
        return self.digest_of(
            text=text,
            files=self.identity("text_encoder", "tokenizer"),
            template=[self.system_message, TEMPLATE_TOKENS, self.max_tokens, SKIPPED_LAYERS],
            # A prompt that quotes nothing never meets the glyph encoder.
            glyph=glyph if extract_glyph_texts(text) is not None else None,
        )

    @torch.no_grad()
    def encode(self, text: str) -> PromptEmbedding:
        tokenizer, place = self.tokenizer("tokenizer"), self.place
        states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            text_encoder=self.network("text_encoder"),
            tokenizer=tokenizer,
            prompt=text,
            device=place.device,
            tokenizer_max_length=self.max_tokens,
            num_hidden_layers_to_skip=SKIPPED_LAYERS,
            system_message=self.system_message,
            crop_start=TEMPLATE_TOKENS,
        )
        tensors = {TEXT: _valid(states, mask, place.dtype)}
        conversation = tokenizer.apply_chat_template(
            format_text_input([text], self.system_message),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        count = len(conversation.input_ids[0]) - TEMPLATE_TOKENS
        notes = cut_note(count, self.max_tokens, "the prompt")
        quoted = extract_glyph_texts(text)
        if quoted is not None:
            tokenizer = self.tokenizer("tokenizer_2")
            states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
                tokenizer=tokenizer,
                text_encoder=self.network("text_encoder_2"),
                prompt=text,
                device=place.device,
                tokenizer_max_length=MAX_GLYPH_TOKENS,
            )
            tensors[GLYPH] = _valid(states, mask, place.dtype)
            count = len(tokenizer(quoted).input_ids)
            notes += cut_note(count, MAX_GLYPH_TOKENS, "the quoted text")
        return PromptEmbedding(self.key(text), tensors, notes)


def _valid(states_1NW: Tensor, mask_1N: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of real tokens, in front of the padding, on the CPU [N, W]."""
    count = int(mask_1N[0].sum())
    assert bool(mask_1N[0, :count].all()), "tokens are padded on the right"
    return states_1NW[0, :count].to(dtype).cpu().clone()


class WanPrompts(CheckpointEncoder):
    """The checkpoint's `PromptEncoder`: `text` [N, W].

    Called directly the library would cut at 226 tokens; its pipeline asks for 512.
    """

    tensors = {TEXT: True}
    max_tokens = WAN_MAX_TOKENS

    def key(self, text: str) -> str:
        """By the cleaned string, which another ftfy, or none, would clean differently."""
        return self.digest_of(
            text=prompt_clean(text),
            files=self.identity("text_encoder", "tokenizer"),
            max_tokens=self.max_tokens,
            ftfy=installed_version("ftfy"),
        )

    @torch.no_grad()
    def encode(self, text: str) -> PromptEmbedding:
        tokenizer, place = self.tokenizer("tokenizer"), self.place
        count = len(tokenizer(prompt_clean(text)).input_ids)
        pipeline: Any = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=self.network("text_encoder"),
            vae=None,
            scheduler=None,
        )
        states_1NW, _ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
            device=place.device,
            dtype=place.dtype,
        )
        valid_NW = states_1NW[0, : min(count, self.max_tokens)].cpu().clone()
        notes = cut_note(count, self.max_tokens, "the prompt")
        return PromptEmbedding(self.key(text), {TEXT: valid_NW}, notes)
