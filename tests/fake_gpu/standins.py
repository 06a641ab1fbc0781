"""Stand-ins for what only a GPU can decide or run: outputs are made, nothing is launched.

Triton's launches are recorded with their arguments. Attention is torch's own: its function checks
what it is given, its biases decide, and its fused operations make the outputs. The one thing that
is put in is which of them a Hopper would take, because torch asks the driver for that: by torch's
rules, flash attention without a mask in 16 bits, the memory-efficient one with a mask or in
float32, else plain products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.utils._mode_utils import no_dispatch

# A kernel's name and its arguments by name; queries, keys, values, a mask, whether rows are causal.
Launched = Callable[[str, dict[str, Any]], None]
Attended = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], None]
# Widest heads of flash attention; the memory-efficient one takes any that fill 16 bytes.
_MOST_FLASH = 256


def _nothing(*_told: Any) -> None:
    """Nobody asked."""


def _attention(attended: Attended) -> Callable[..., Tensor]:
    """torch's attention, which sends that on a GPU to the operation that it would choose there."""
    own = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        if query.device.type != "cuda":
            return own(*given, **options)
        attended(query, key, value, attn_mask, is_causal)
        if isinstance(attn_mask, bias.CausalBias):
            assert attn_mask.seq_len_q != attn_mask.seq_len_kv, "it would call this again"
            return bias.CausalBias._dispatch(*given, **options)  # its own rules
        _check(query, key, value, attn_mask)
        return _chosen(*given, **options)

    return attend


def _check(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
    """What torch's function refuses, it refuses here."""
    every = [one for one in (q, keys, values, mask) if one is not None]
    assert len({one.device for one in every}) == 1, [one.device for one in every]
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert mask is None or mask.dtype in (torch.bool, q.dtype), (mask.dtype, q.dtype)
    assert q.shape[-1] == keys.shape[-1], (q.shape, keys.shape)


def _chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    ops, is_wide = torch.ops.aten, query.dtype == torch.float32
    width, is_fused = query.shape[-1], query.dim() == 4
    if is_fused and attn_mask is None and not is_wide and width <= _MOST_FLASH:
        return ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if is_fused and query.shape[1] == key.shape[1] and width % (16 // query.itemsize) == 0:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # as torch does before it calls the kernel
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                    attn_mask.logical_not(), float("-inf")
                )
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return ops._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale
        )[0]
    return ops._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _yes(*_given: Any) -> bool:
    """A mock would keep what it was given, and so its memory."""
    return True


def _new_bias(cls: type, *given: Any, **named: Any) -> Any:
    """A bias has no numbers; torch's fake mode would make another subclass of its tensor."""
    with no_dispatch():
        return torch.Tensor._make_subclass(cls, torch.empty(0))


@contextmanager
def stand_ins(launched: Launched = _nothing, attended: Attended = _nothing) -> Iterator[None]:
    """Inside, kernels are told about instead of started."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        launched(kernel.fn.__name__.removeprefix("_"), given)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(bias.CausalBias, "__new__", _new_bias),
        mock.patch.object(bias, "can_use_flash_attention", _yes),
        mock.patch.object(F, "scaled_dot_product_attention", _attention(attended)),
    ):
        yield
