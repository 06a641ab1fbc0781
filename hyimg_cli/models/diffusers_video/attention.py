"""Joint attention of HunyuanVideo-1.5 without a mask, where every token is valid.

The library's processor expands the text's mask to [B, 1, S, S] in every block: 2.6 GB at 480p,
and no mask-free kernel can be picked. Given a mask, this one is the library's own.
"""

# Legend: B batch, S sequence, M model width, H heads, D head width
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15AttnProcessor2_0,
)
from torch import Tensor, nn


class MaskFreeAttention(HunyuanVideo15AttnProcessor2_0):
    """A drop-in processor: mask-free when it is given no mask."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Video and text rows, [B, S, M] each, attending to all of both."""
        if attention_mask is not None or encoder_hidden_states is None:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        video: list[Any] = [
            _heads(project, hidden_states, attn) for project in (attn.to_q, attn.to_k)
        ]
        video = [attn.norm_q(video[0]), attn.norm_k(video[1])]
        if image_rotary_emb is not None:
            video = [apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in video]
        text = [
            _heads(project, encoder_hidden_states, attn)
            for project in (attn.add_q_proj, attn.add_k_proj)
        ]
        text = [_normed(attn.norm_added_q, text[0]), _normed(attn.norm_added_k, text[1])]
        video.append(_heads(attn.to_v, hidden_states, attn))
        text.append(_heads(attn.add_v_proj, encoder_hidden_states, attn))
        query_BSHD, key_BSHD, value_BSHD = (
            torch.cat(pair, dim=1) for pair in zip(video, text, strict=True)
        )
        mixed_BSM = dispatch_attention_fn(
            query_BSHD,
            key_BSHD,
            value_BSHD,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        split = hidden_states.shape[1]
        video_BSM, text_BSM = mixed_BSM[:, :split], mixed_BSM[:, split:]
        return attn.to_out[1](attn.to_out[0](video_BSM)), attn.to_add_out(text_BSM)


def _heads(project: nn.Module, rows_BSM: Tensor, attn: Any) -> Tensor:
    heads_BSHD: Tensor = project(rows_BSM).unflatten(2, (attn.heads, -1))
    return heads_BSHD


def _normed(norm: nn.Module | None, x_BSHD: Tensor) -> Tensor:
    normed: Tensor = x_BSHD if norm is None else norm(x_BSHD)
    return normed
