"""Rows of one decode step, of different lengths, in pages whose unwritten slots are NaN."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.kernels.decode_attention import PagedRows

PAGE = 16
LENGTHS = (0, 1, 31, 63, 64, 65, 300, 2500)


@dataclass(frozen=True)
class Step:
    """Arguments of a decode attention."""

    q_RHD: Tensor
    k_RKD: Tensor
    v_RKD: Tensor
    rows: PagedRows

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q_RHD, self.k_RKD, self.v_RKD, self.rows

    def apart(self) -> "Step":
        """The same step in memory of its own."""
        sides = self.rows.keys_SKD.clone(), self.rows.values_SKD.clone()
        return replace(self, rows=rows_of(*sides, self.rows.pages_RP, self.rows.length_R))

    def of_row(self, row: int) -> "Step":
        """The step of one row alone, in the same memory."""
        rows, only = self.rows, slice(row, row + 1)
        tables = rows.pages_RP[only], rows.length_R[only]
        own = rows_of(rows.keys_SKD, rows.values_SKD, *tables)
        return Step(self.q_RHD[only], self.k_RKD[only], self.v_RKD[only], own)


def step(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (6, 2),
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Step:
    """A new token behind each of `lengths`; the pages of a row are anywhere."""
    count, (query, kv) = len(lengths), heads
    needed = [length // PAGE + 1 for length in lengths]
    free = torch.randperm(sum(needed) + 5)
    pages_RP = torch.zeros(count, max(needed), dtype=torch.int64)
    shape = (len(free) * PAGE, kv, width)
    sides = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for row, (length, pages) in enumerate(zip(lengths, free[:-5].split(needed), strict=True)):
        pages_RP[row, : len(pages)] = pages
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length].to(device)
        for side in sides:
            side[slots] = torch.randn(length, kv, width).to(side)
    new = torch.randn(count, query + 2 * kv, width).to(device, dtype).split([query, kv, kv], dim=1)
    tables = pages_RP.to(device), torch.tensor(lengths, device=device)
    return Step(*new, rows_of(*sides, *tables))


def rows_of(keys: Tensor, values: Tensor, pages_RP: Tensor, length_R: Tensor) -> PagedRows:
    """The rows, with pointers to their memory."""
    pointers = torch.tensor([keys.data_ptr(), values.data_ptr()]).to(length_R)
    return PagedRows(keys, values, pointers, pages_RP, length_R, PAGE)
