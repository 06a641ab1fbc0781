"""Attention as it would be written down: a mask of every pair, scores of every pair."""

# Legend: T new token, H query head, K kv head, D head width, S slot
from collections.abc import Sequence

import torch
from torch import Tensor

from hyimg_cli.kernels.attention import causal_mask
from hyimg_cli.models.common.spans import QuerySpan


def plain_attention(q_THD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, is_causal: bool) -> Tensor:
    """The twin of every kernel: scores, softmax and sum written out in float32."""
    queries, slots = q_THD.shape[0], keys_KSD.shape[1]
    group = q_THD.shape[1] // keys_KSD.shape[0]
    keys_HSD, values_HSD = (
        rows.float().repeat_interleave(group, dim=0) for rows in (keys_KSD, values_KSD)
    )
    scores_HTS = q_THD.float().transpose(0, 1) @ keys_HSD.mT / q_THD.shape[2] ** 0.5
    if is_causal:
        hidden = ~causal_mask(queries, slots, q_THD.device)
        scores_HTS = scores_HTS.masked_fill(hidden, -torch.inf)
    seen_THD: Tensor = (scores_HTS.softmax(dim=-1) @ values_HSD).transpose(0, 1).to(q_THD.dtype)
    return seen_THD


def visibility(parts: Sequence[QuerySpan], length: int) -> Tensor:
    """The mask of some spans, boolean [queries, length], True where visible."""
    first, last = parts[0].start, parts[-1].stop
    seen = torch.zeros(last - first, length, dtype=torch.bool)
    for piece in parts:
        rows = slice(piece.start - first, piece.stop - first)
        seen[rows, : piece.stop] = True
        if piece.is_causal:
            seen[rows, : piece.stop] = causal_mask(piece.stop - piece.start, piece.stop)
    return seen
