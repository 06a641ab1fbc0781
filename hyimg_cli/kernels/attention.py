"""Attention of a row's new tokens over its own keys: own length, grouped heads, no mask.

Queries are the last tokens of the keys: causal means that each sees itself and earlier tokens,
otherwise each sees all.
"""

# Legend: T new token, H query head, K kv head, D head width, S slot
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_LOG = logging.getLogger(__name__)
SpanAttention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
_HOPPER, _AMPERE = 9, 8
# Earlier `varlen_attn` has no pages, or no `num_splits` without another library.
_PACKED_SINCE = "2.15"


class PackedAttention(NamedTuple):
    """torch's `varlen_attn`: many spans in one call; `takes_full`: also those that are full."""

    varlen: Callable[..., Any]
    takes_full: bool


def attention_of(device: torch.device) -> SpanAttention:
    """Return the attention for a layer on `device`; called once, when the model is built."""
    return fused_attention if device.type == "cuda" else masked_attention


def packed_attention_of(device: torch.device, dtype: torch.dtype) -> PackedAttention | None:
    """Return the attention of many spans in one call, or None; called once, as `attention_of`.

    It is flash attention: `num_splits=1`, without which a row's bits depend on other rows, is
    refused by cuDNN. So full spans are left to cuDNN's kernel where torch takes it.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or torch.version.hip:
        return None
    if torch.cuda.get_device_capability(device)[0] < _AMPERE:
        return None
    if torch.__version__ < _PACKED_SINCE:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return PackedAttention(varlen_attn, not _takes_cudnn(device, dtype))


def warn_of_slow_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Warn on a Hopper GPU if attention will not use cuDNN's kernel.

    By published figures the next one takes about 2 ms more per layer at the released size.
    """
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return
    if not _takes_cudnn(device, dtype):
        _LOG.warning(
            "attention does not use cuDNN's kernel (cuDNN %s, torch %s): it works, but is slower",
            torch.backends.cudnn.version(), torch.__version__,
        )  # fmt: skip


def _takes_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch takes cuDNN's kernel: not what could run, as some are not sound."""
    from torch.nn.attention import SDPBackend

    q_1HTD = torch.empty(1, 8, 256, 128, dtype=dtype, device=device)
    k_1KSD = q_1HTD[:, :2]
    choice = torch._fused_sdp_choice(q_1HTD, k_1KSD, k_1KSD, enable_gqa=True)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def masked_attention(
    q_THD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, is_causal: bool
) -> Tensor:
    """Return attention [T, H, D]; a mask is built only for causal rows after a prefix."""
    queries, slots = q_THD.shape[0], keys_KSD.shape[1]
    needs_mask = is_causal and 1 < queries < slots
    mask = causal_mask(queries, slots, q_THD.device) if needs_mask else None
    return _attended(q_THD, keys_KSD, values_KSD, mask, is_causal and queries == slots)


def fused_attention(q_THD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, is_causal: bool) -> Tensor:
    """Return the same without a mask in memory: causal rows have a bias that kernels know.

    torch chooses the kernel: cuDNN's on a Hopper with a sound version (before 9.15.1 it read past
    lengths that are not multiples of 128), else flash. A bias goes to flash. So does a single
    query: cuDNN makes a plan for each new length, and every token of a text has a new one.
    """
    # This imports torch's compiler, which takes longer than loading a small model.
    from torch.nn.attention.bias import causal_lower_right

    queries, slots = q_THD.shape[0], keys_KSD.shape[1]
    is_behind = queries < slots and (is_causal or queries == 1)
    mask = causal_lower_right(queries, slots) if is_behind else None
    return _attended(q_THD, keys_KSD, values_KSD, mask, is_causal and 1 < queries == slots)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return [queries, keys], True where the last `queries` of `keys` tokens may attend."""
    full = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return full.tril(diagonal=keys - queries)


def _attended(
    q_THD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    q_HTD, dtype = q_THD.transpose(0, 1), q_THD.dtype
    keys_KSD, values_KSD = keys_KSD.to(dtype), values_KSD.to(dtype)
    row = q_HTD[None], keys_KSD[None], values_KSD[None], mask
    out_1HTD = F.scaled_dot_product_attention(*row, is_causal=is_causal, enable_gqa=True)
    return out_1HTD[0].transpose(0, 1)
