"""Attention of AR decode: one new token a row, K/V in pages, lengths on the device.

    put [R, K]           the new key and value go to slot `length` of their row
    partial [R, K, N]    one of N runs of a row's slots: softmax sums of one kv head's query heads
    joined [R, H]        the runs of a row, weighted by their sums

The kernels find a layer's slots by a pointer, and a row's among them by its table of pages, all on
the device: so a CUDA graph of them serves rows of any length, and an arena that grows. The plain
twin takes the same call. No atomics, and a row's runs depend on its own length alone. Block sizes
are estimated, not measured.
"""

# Legend: R row (a job that writes), H query head, K kv head, D head width, S slot, P page of a
# row, N run of slots
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RUNS, BLOCK = 32, 64


@dataclass(frozen=True)
class PagedRows:
    """One layer's K/V, [S, K, D], and where each row's are.

    `pointers`: of keys and values. `pages` [R, P]: the pages of `page` slots, in order; `length`
    [R]: tokens before the new one. All int64 on the device, and all that the kernels read; the twin
    reads `keys` and `values` in place of pointers.
    """

    keys_SKD: Tensor
    values_SKD: Tensor
    pointers_2: Tensor
    pages_RP: Tensor
    length_R: Tensor
    page: int


DecodeAttention = Callable[[Tensor, Tensor, Tensor, PagedRows], Tensor]


def plain_decode(q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, rows: PagedRows) -> Tensor:
    """Return attention [R, H, D] of one token a row, appending its key and value.

    In float32. Reads no length on the host: all slots of a table are read, later ones masked.
    """
    seen = []
    for q_HD, k_KD, v_KD, pages_P, length_1 in zip(
        q_RHD, k_RKD, v_RKD, rows.pages_RP, rows.length_R.split(1), strict=True
    ):
        slots_PS = pages_P[:, None] * rows.page + torch.arange(rows.page, device=q_RHD.device)
        slot_S = slots_PS.flatten()
        for side_SKD, new_KD in ((rows.keys_SKD, k_KD), (rows.values_SKD, v_KD)):
            side_SKD.index_copy_(0, slot_S.gather(0, length_1), new_KD[None].to(side_SKD.dtype))
        is_hidden_S = torch.arange(len(slot_S), device=q_RHD.device) > length_1
        # A masked slot may hold NaN: it was never written, or is not the row's.
        keys_KSD, values_KSD = (
            side[slot_S].float().masked_fill(is_hidden_S[:, None, None], 0).transpose(0, 1)
            for side in (rows.keys_SKD, rows.values_SKD)
        )
        q_KGD = q_HD.float().unflatten(0, (len(keys_KSD), -1))
        scores_KGS = (q_KGD @ keys_KSD.mT) / q_RHD.shape[-1] ** 0.5
        share_KGS = scores_KGS.masked_fill(is_hidden_S, -torch.inf).softmax(dim=-1)
        seen.append((share_KGS @ values_KSD).flatten(0, 1))
    return torch.stack(seen).to(q_RHD.dtype)
