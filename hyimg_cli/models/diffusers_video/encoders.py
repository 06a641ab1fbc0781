"""Encoders of a checkpoint, loaded when needed and released on request, and their keys.

Text: HunyuanVideo-1.5's Qwen2.5-VL (prompt) and ByT5 (quoted text), and Wan's UMT5, 512 rows for
the transformer of which only valid ones are kept. Cleaning and encoding are diffusers' own, called
one string at a time under no_grad: with gradients another attention kernel is chosen, with other
bits.
"""

# Legend: N tokens of the main stream, M glyph tokens, W width

import gc
import inspect
from collections import Counter
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
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.record import HUNYUAN_GLYPH_TOKENS
from hyimg_cli.models.diffusers_video.weights import (
    LoadTarget,
    load_tokenizer,
    load_weights,
    text_encoder_of,
)
from hyimg_cli.models.latent import ConditionEncoder, PromptEmbedding

TEXT, GLYPH = "text", "glyph"
TEMPLATE_TOKENS = 108
SKIPPED_LAYERS = 2


class CheckpointEncoder(ConditionEncoder[Any]):
    """Encoders of a checkpoint with tokenizers or processors, loaded at first use.

    A family adds `key` and `encode`.
    """

    def __init__(self, layout: CheckpointLayout, place: LoadTarget, max_tokens: int = 0) -> None:
        """Open the encoders; `max_tokens`: of a text."""
        self.layout, self.place, self.max_tokens = layout, place, max_tokens
        self.encoder_runs = Counter()
        self._networks: dict[str, Any] = {}
        self._tokenizers: dict[str, Any] = {}

    def network(self, name: str) -> Any:
        """Return an encoder for one run; `encoder_runs` counts it."""
        if name not in self._networks:
            self._networks[name] = load_weights(self.layout.components[name], self.place)
        self.encoder_runs[name] += 1
        self.place.offload.onload(self._networks[name])
        return self._networks[name]

    def tokenizer(self, name: str) -> Any:
        """Return a tokenizer with a row in its encoder for each token, or a picture processor."""
        if name not in self._tokenizers:
            encoder = text_encoder_of(self.layout, name)
            self._tokenizers[name] = load_tokenizer(self.layout.components[name], encoder)
        return self._tokenizers[name]

    def identity(self, *names: str) -> list[str]:
        """Return the digests of components' files."""
        return [self.layout.identity_of(name) for name in names]

    def release(self) -> None:
        """Free the networks' memory; tokenizers stay."""
        if not self._drop_networks():
            return  # a collection takes a third of a second
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_networks(self) -> bool:
        """Release all networks; return False if none was held."""
        if self._networks:
            self.place.offload.unload()
            self._networks.clear()
            return True
        return False

    def digest_of(self, **parts: Any) -> str:
        """Return a digest of `parts` and all that shapes embeddings (dtype, device, libraries)."""
        place = self.place
        return self.layout.encoding_key(place.dtype_name, device_class(place.device), **parts)


def device_class(device: torch.device) -> str:
    """Return the device kind that decides a kernel's rounding: the CPU, or a GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cut_note(count: int, limit: int, what: str) -> tuple[str, ...]:
    """Return a note if a text is longer than its encoder reads."""
    if count <= limit:
        return ()
    return (f"{what} is {count} tokens long and was cut: its encoder reads {limit}",)


class HunyuanPrompts(CheckpointEncoder):
    """The `ConditionEncoder` of texts: `text` [N, W] always, `glyph` [M, W] for quoted text."""

    @cached_property
    def system_message(self) -> str:
        """Return the library's message, spaces included: the template counts on 108 tokens."""
        signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
        return str(signature.parameters["system_message"].default)

    def key(self, text: str) -> str:
        """Return the key of the exact string, unstripped."""
        glyph = [*self.identity("text_encoder_2", "tokenizer_2"), HUNYUAN_GLYPH_TOKENS]
        return self.digest_of(
            text=text,
            files=self.identity("text_encoder", "tokenizer"),
            template=[self.system_message, TEMPLATE_TOKENS, self.max_tokens, SKIPPED_LAYERS],
            # A prompt without quoted text never uses the glyph encoder.
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
                tokenizer_max_length=HUNYUAN_GLYPH_TOKENS,
            )
            tensors[GLYPH] = _valid(states, mask, place.dtype)
            count = len(tokenizer(quoted).input_ids)
            notes += cut_note(count, HUNYUAN_GLYPH_TOKENS, "the quoted text")
        return PromptEmbedding(self.key(text), tensors, notes)


def _valid(states_1NW: Tensor, mask_1N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of real tokens, before the padding, on the CPU [N, W]."""
    count = int(mask_1N[0].sum())
    assert bool(mask_1N[0, :count].all()), "tokens are padded on the right"
    return states_1NW[0, :count].to(dtype).cpu().clone()


class WanPrompts(CheckpointEncoder):
    """The `ConditionEncoder` of texts: `text` [N, W].

    Called directly, the library would cut at 226 tokens; its pipeline asks for 512.
    """

    def key(self, text: str) -> str:
        """Return the key of the cleaned string, because another ftfy cleans differently."""
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
            tokenizer=tokenizer, text_encoder=self.network("text_encoder"), vae=None, scheduler=None
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
