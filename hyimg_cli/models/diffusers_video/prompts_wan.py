"""Wan's text encoder, UMT5: always 512 rows for the transformer, only the valid ones kept.

Cleaning and encoding are diffusers' own (`WanPipeline.encode_prompt`), one string at a time under
no_grad. Called directly it would cut at 226 tokens; its pipeline asks for 512.
"""

# Legend: N tokens, W width
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from hyimg_cli.errors import installed_version
from hyimg_cli.models.diffusers_video.card import WAN_MAX_TOKENS
from hyimg_cli.models.diffusers_video.encoders import CheckpointEncoder, cut_note
from hyimg_cli.models.latent_video import PromptEmbedding

TEXT = "text"


class WanPrompts(CheckpointEncoder):
    """The checkpoint's `PromptEncoder`: `text` [N, W]."""

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
