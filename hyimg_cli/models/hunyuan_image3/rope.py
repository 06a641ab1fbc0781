"""2-D rotary embedding: positions of a layout, their cosines and sines.

Text at index p is at (p, p), which is 1-D RoPE; image tokens are on a grid centred on the index
range they occupy. Golden case 2. `kernels` rotate by these.
"""

# Legend: 2 cosines, then sines; T token, D head width
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hyimg_cli.cache.memo import Memo
from hyimg_cli.kernels.transfer import sent
from hyimg_cli.models.common.layers import rope_rows
from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock


class RopeTables:
    """Angles by position, computed once per device: one table for text, and one per image layout.

    Rows are slices of a table, so a decode step computes no angle.
    """

    def __init__(self, *, head_dim: int, theta: float, budget_bytes: int = 256_000_000) -> None:
        self._head_dim, self._theta = head_dim, theta
        self._tables: Memo[Hashable, Tensor] = Memo(budget_bytes, lambda table: table.nbytes)

    def counts(self) -> dict[str, int]:
        """Count how often a table was found, and how often it was made."""
        return self._tables.counts()

    def text(self, spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Return angles [2, T, D] of text tokens `[start, stop)`, all spans one after another."""
        table_2TD = self.rows(0, max(stop for _, stop in spans), (), device)
        return torch.cat([table_2TD[:, start:stop] for start, stop in spans], dim=1)

    def rows(
        self, start: int, stop: int, blocks: Sequence[ImageBlock], device: torch.device
    ) -> Tensor:
        """Return angles of the tokens `[start, stop)` of a sequence with image blocks in it."""
        end = max([stop, *(block.start + block.grid.cells for block in blocks)])
        # The next power of two, so that many lengths share few tables.
        size = 1 << max(8, (end - 1).bit_length())

        def make() -> Tensor:
            angles_2TD = rope(positions(size, blocks), head_dim=self._head_dim, theta=self._theta)
            return sent(angles_2TD, device)

        return self._tables.get((size, tuple(blocks), device), make)[:, start:stop]


def positions(length: int, blocks: Sequence[ImageBlock]) -> Tensor:
    """Return (y, x) of every token, int64 [length, 2].

    Images neither compress nor shift the numbering.
    """
    yx_T2 = torch.arange(length)[:, None].repeat(1, 2)
    for block in blocks:
        rows, columns = block.grid.rows, block.grid.columns
        # Half-integers are truncated: the block's middle is the middle of its index range.
        top = block.start + (rows * columns - rows) // 2
        left = block.start + (rows * columns - columns) // 2
        cells = slice(block.start, block.start + block.grid.cells)
        yx_T2[cells, 0] = torch.arange(top, top + rows).repeat_interleave(columns)
        yx_T2[cells, 1] = torch.arange(left, left + columns).repeat(rows)
    return yx_T2


def rope(yx_T2: Tensor, *, head_dim: int, theta: float) -> Tensor:
    """Return cosines and sines for positions [T, 2], float32 [2, T, D].

    Even frequencies rotate with y, odd ones with x. The head_dim/2 angles are repeated along the
    last axis, for half-split rotation.
    """
    device = yx_T2.device
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = theta ** (-even / head_dim)
    axis = torch.arange(head_dim // 2, device=device) % 2
    return rope_rows(yx_T2.float()[:, axis] * frequency)
