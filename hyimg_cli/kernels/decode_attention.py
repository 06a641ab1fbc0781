"""Attention of AR decode: one new token a row, K/V in place, lengths on the device.

    put [R, K]           the new key and value go to slot `length` of their row
    partial [R, K, N]    one of N runs of a row's slots: softmax sums of one kv head's query heads
    joined [R, H]        the runs of a row, weighted by their sums

The kernels find a row's K/V by a pointer and its length in tables on the device, so a CUDA graph of
them serves buffers of any length: only the tables change between replays. The plain twin takes the
same call and the same lengths, and finds K/V as tensors. No atomics, and a row's runs depend on its
own length alone. Block sizes are estimated, not measured.
"""

# Legend: R row (a job that writes), H query head, K kv head, D head width, S slot, N run of slots
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RUNS, BLOCK = 32, 64


@dataclass(frozen=True)
class KVPointers:
    """One layer's K/V of each row, [K, S, D] with its own S, and their pointers.

    `keys_ptr`, `values_ptr` [R]: pointers. `heads` [R]: slots from one head to the next. `length`
    [R]: tokens before the new one. All int64 on the device, and all that the kernels read; the twin
    reads `keys`, `values` and `length`.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    keys_ptr_R: Tensor
    values_ptr_R: Tensor
    heads_R: Tensor
    length_R: Tensor


DecodeAttention = Callable[[Tensor, Tensor, Tensor, KVPointers], Tensor]


def plain_decode(q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, rows: KVPointers) -> Tensor:
    """Return attention [R, H, D] of one token a row, appending its key and value.

    In float32. Reads no length on the host: all slots of a row are read, later ones masked.
    """
    seen = []
    for row, (keys_KSD, values_KSD) in enumerate(zip(rows.keys, rows.values, strict=True)):
        slot_1 = rows.length_R[row : row + 1]
        keys_KSD.index_copy_(1, slot_1, k_RKD[row][:, None].to(keys_KSD.dtype))
        values_KSD.index_copy_(1, slot_1, v_RKD[row][:, None].to(values_KSD.dtype))
        # A masked slot was never written and may hold NaN.
        is_hidden_S = torch.arange(keys_KSD.shape[1], device=keys_KSD.device) > slot_1
        hidden_S1 = is_hidden_S[:, None]
        keys, values = (t.float().masked_fill(hidden_S1, 0) for t in (keys_KSD, values_KSD))
        q_KGD = q_RHD[row].float().unflatten(0, (keys.shape[0], -1))
        scores_KGS = (q_KGD @ keys.mT) / q_RHD.shape[-1] ** 0.5
        share_KGS = scores_KGS.masked_fill(is_hidden_S, -torch.inf).softmax(dim=-1)
        seen.append((share_KGS @ values).flatten(0, 1))
    return torch.stack(seen).to(q_RHD.dtype)
