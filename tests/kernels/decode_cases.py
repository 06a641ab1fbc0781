"""Rows of one decode step, of different lengths, in memory whose unwritten slots are NaN."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.kernels.decode_attention import KVPointers

LENGTHS = (0, 1, 31, 63, 64, 65, 300, 2500)


@dataclass(frozen=True)
class Step:
    """Arguments of a decode attention."""

    q_RHD: Tensor
    k_RKD: Tensor
    v_RKD: Tensor
    rows: KVPointers

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q_RHD, self.k_RKD, self.v_RKD, self.rows

    def apart(self) -> "Step":
        """The same step in memory of its own."""
        keys, values = ([t.clone() for t in side] for side in (self.rows.keys, self.rows.values))
        return replace(self, rows=rows_of(keys, values, self.rows.length_R))


def step(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (6, 2),
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Step:
    """A new token behind each of `lengths`; every row has some slots to spare."""
    count, (query, kv) = len(lengths), heads
    keys, values = [], []
    for number, length in enumerate(lengths):
        for side in (keys, values):
            slots = length + 1 + 7 * number
            memory = torch.full((kv, slots, width), torch.nan, dtype=dtype, device=device)
            memory[:, :length] = torch.randn(kv, length, width).to(memory)
            side.append(memory)
    new = torch.randn(count, query + 2 * kv, width).to(device, dtype).split([query, kv, kv], dim=1)
    return Step(*new, rows_of(keys, values, torch.tensor(lengths, device=device)))


def rows_of(keys: list[Tensor], values: list[Tensor], length_R: Tensor) -> KVPointers:
    """Their table."""
    at = [torch.tensor([t.data_ptr() for t in side]).to(length_R) for side in (keys, values)]
    width = keys[0].shape[2]
    heads = torch.tensor([t.stride(0) // width for t in keys]).to(length_R)
    return KVPointers(keys, values, *at, heads, length_R)
