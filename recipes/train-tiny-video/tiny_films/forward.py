"""Run the transformer on a batch of films with gradients, with prompts of any length.

The library's forward pads every prompt to 1985 tokens. Here they are padded to the longest of the
batch and masked as keys, so padded rows are never seen. A test compares this with the product.

Shapes: B films · C channels · F Y X latent frames, rows, columns · N text tokens · S all tokens · W
M widths of the encoder and of the blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from hyimg_cli.models.diffusers_video.encoders import GLYPH, TEXT
from hyimg_cli.models.latent import PromptEmbedding

_HIDDEN = -1e9


@dataclass(frozen=True)
class Texts:
    """A batch of prompts: encoder rows [B, N, W] and which are real, for both encoders."""

    text_BNW: Tensor
    is_text_BN: Tensor
    glyph_BNW: Tensor
    is_glyph_BN: Tensor


def texts_of(embeddings: Sequence[PromptEmbedding], glyph_width: int) -> Texts:
    """Return prompts padded to the longest."""
    none = torch.zeros(0, glyph_width)
    text = _padded([e.tensors[TEXT] for e in embeddings])
    glyph = _padded([e.tensors.get(GLYPH, none) for e in embeddings])
    return Texts(*text, *glyph)


def velocity(network: Any, noisy_BCFYX: Tensor, sigma_B: Tensor, texts: Texts) -> Tensor:
    """Return the transformer's velocity [B, C, F, Y, X] for text-to-video.

    Source: the order of diffusers' HunyuanVideo15Transformer3DModel.forward.
    """
    timestep_B = 1000 * sigma_B
    frames, height, width = noisy_BCFYX.shape[2:]
    condition = noisy_BCFYX.new_zeros(
        len(noisy_BCFYX), noisy_BCFYX.shape[1] + 1, *noisy_BCFYX.shape[2:]
    )
    model_input = torch.cat([noisy_BCFYX, condition], dim=1)
    time_BM = network.time_embed(timestep_B)
    video_BSM = network.x_embedder(model_input)
    text_BNM, is_text_BN = _joined_texts(network, timestep_B, texts)
    is_real_BS = torch.cat([is_text_BN.new_ones(video_BSM.shape[:2]), is_text_BN], dim=1)
    bias_B11S = torch.zeros(is_real_BS.shape).masked_fill(~is_real_BS, _HIDDEN)[:, None, None]
    rotary = network.rope(noisy_BCFYX)
    for block in network.transformer_blocks:
        video_BSM, text_BNM = block(video_BSM, text_BNM, time_BM, bias_B11S, rotary)
    rows_BSC = network.proj_out(network.norm_out(video_BSM, time_BM))
    return rows_BSC.transpose(1, 2).unflatten(2, (frames, height, width))


def prepared(network: Any) -> Any:
    """Use this module's attention in the network's blocks."""
    for block in network.transformer_blocks:
        block.attn.set_processor(BiasedAttention())
    return network


class BiasedAttention:
    """Joint attention written out, with a bias on the keys [B, 1, 1, S].

    The fused attention's backward pass on a CPU is several times slower here.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        video = [_heads(project, hidden_states, attn) for project in (attn.to_q, attn.to_k)]
        text = [
            _heads(project, encoder_hidden_states, attn)
            for project in (attn.add_q_proj, attn.add_k_proj)
        ]
        video = [attn.norm_q(video[0]), attn.norm_k(video[1])]
        video = [apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in video]
        text = [attn.norm_added_q(text[0]), attn.norm_added_k(text[1])]
        value = torch.cat(
            [
                _heads(attn.to_v, hidden_states, attn),
                _heads(attn.add_v_proj, encoder_hidden_states, attn),
            ],
            dim=1,
        ).transpose(1, 2)
        query, key = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(video, text, strict=True)
        )
        scores_BHSS = query @ (key / math.sqrt(key.shape[-1])).mT + attention_mask
        mixed_BSM = (scores_BHSS.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        split = hidden_states.shape[1]
        video_BSM, text_BNM = mixed_BSM[:, :split], mixed_BSM[:, split:]
        return attn.to_out[0](video_BSM), attn.to_add_out(text_BNM)


def _joined_texts(network: Any, timestep_B: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
    """Return text rows for the blocks, glyphs after the prompt: their order has no effect."""
    kinds_3M = network.cond_type_embed.weight
    text_BNM = _refined(network.context_embedder, timestep_B, texts) + kinds_3M[0]
    if not texts.is_glyph_BN.any():
        return text_BNM, texts.is_text_BN
    glyph_BNM = network.context_embedder_2(texts.glyph_BNW) + kinds_3M[1]
    return (
        torch.cat([text_BNM, glyph_BNM], dim=1),
        torch.cat([texts.is_text_BN, texts.is_glyph_BN], dim=1),
    )


def _refined(refiner: Any, timestep_B: Tensor, texts: Texts) -> Tensor:
    """Run HunyuanVideo15TokenRefiner with only keys masked.

    With queries masked too, a padded row has nothing to attend to.
    """
    weight_BN1 = texts.is_text_BN[:, :, None].to(texts.text_BNW)
    pooled_BW = (texts.text_BNW * weight_BN1).sum(dim=1) / weight_BN1.sum(dim=1)
    time_BM = refiner.time_text_embed(timestep_B, pooled_BW)
    rows_BNM = refiner.proj_in(texts.text_BNW)
    mask_B1NN = texts.is_text_BN[:, None, None].expand(-1, 1, rows_BNM.shape[1], -1)
    for block in refiner.token_refiner.refiner_blocks:
        rows_BNM = block(rows_BNM, time_BM, mask_B1NN)
    return rows_BNM


def _heads(project: nn.Module, rows_BSM: Tensor, attn: Any) -> Tensor:
    heads_BSHD: Tensor = project(rows_BSM).unflatten(2, (attn.heads, -1))
    return heads_BSHD


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    padded_BNW = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    length_B = torch.tensor([len(row) for row in rows])
    return padded_BNW, torch.arange(padded_BNW.shape[1]) < length_B[:, None]
