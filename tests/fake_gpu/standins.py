"""Stand-ins for kernels that only a GPU can run: outputs are made, nothing is launched.

Callers can record Triton's launches and torch's fused attention with their arguments. Tensors are
fake ones of any size, or real ones on a CPU, whose attention is computed as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

# A kernel's name and its arguments by name; queries, keys, values, a mask, whether rows are causal.
Launched = Callable[[str, dict[str, Any]], None]
Attended = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], None]
_attention = F.scaled_dot_product_attention


def _nothing(*_told: Any) -> None:
    """Nobody asked."""


@contextmanager
def stand_ins(launched: Launched = _nothing, attended: Attended = _nothing) -> Iterator[None]:
    """Inside, kernels are told about instead of started."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        launched(kernel.fn.__name__.removeprefix("_"), given)

    def attend(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if q.device.type != "cuda":
            return _attention(q, keys, values, attn_mask=attn_mask, is_causal=is_causal, **options)
        assert q.dtype == keys.dtype == values.dtype, "one dtype"
        assert q.device == keys.device == values.device, "one device"
        attended(q, keys, values, attn_mask, is_causal)
        # What a fused kernel allocates: a sum for every query, and its output in the order of q.
        torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
        return torch.empty_like(q)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        # torch's own bias is a tensor subclass that its fake mode cannot make.
        mock.patch("torch.nn.attention.bias.causal_lower_right", _lower_right),
    ):
        yield


def _lower_right(queries: int, slots: int) -> Tensor:
    return torch.empty(0, queries, slots)
