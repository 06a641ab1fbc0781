"""2-D rotary embedding: positions of a layout, their cosines and sines; `kernels` rotate by them.

Text at absolute index p stands at (p, p), which is ordinary 1-D RoPE; image tokens stand on a grid
centred on the index range they occupy. Golden case 2.
"""

# Legend: T token, D head width
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.cache.memo import Memo
from hyimg_cli.kernels.transfer import sent
from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of some tokens, float32, [T, D]."""

    cos_TD: Tensor
    sin_TD: Tensor

    def padded(self, count: int) -> "Rope":
        """The same with rows of zeros up to `count`."""
        missing = (0, 0, 0, count - self.cos_TD.shape[0])
        if not any(missing):
            return self
        return Rope(F.pad(self.cos_TD, missing), F.pad(self.sin_TD, missing))

    @property
    def nbytes(self) -> int:
        return self.cos_TD.nbytes + self.sin_TD.nbytes

    def cut(self, start: int, stop: int) -> "Rope":
        """A view of the rows `[start, stop)`."""
        return Rope(self.cos_TD[start:stop], self.sin_TD[start:stop])

    def at(self, place_T: Tensor) -> "Rope":
        """The rows that `place_T` counts off, on the device: no place is known here."""
        return Rope(self.cos_TD.index_select(0, place_T), self.sin_TD.index_select(0, place_T))

    def to(self, device: torch.device) -> "Rope":
        return Rope(self.cos_TD.to(device), self.sin_TD.to(device))


class RopeTables:
    """Angles by position, made once for each device: one table for text, one for each image grid.

    Rows come as slices of them, so that a decode step computes and copies no angle anew.
    """

    def __init__(self, *, head_dim: int, theta: float, budget_bytes: int = 256_000_000) -> None:
        self._head_dim, self._theta = head_dim, theta
        self._tables: Memo[Hashable, Rope] = Memo(budget_bytes, lambda table: table.nbytes)

    def counts(self) -> dict[str, int]:
        """Count how often a table was there, and how often it was made."""
        return self._tables.counts()

    def text(self, spans: Sequence[tuple[int, int]], device: torch.device) -> Rope:
        """Angles of text tokens `[start, stop)`, all spans one after another."""
        table = self.text_table(max(stop for _, stop in spans), device)
        return joined([table.cut(start, stop) for start, stop in spans])

    def text_table(self, stop: int, device: torch.device) -> Rope:
        """Angles of the text tokens `[0, stop)`, and of some behind them."""
        # The next power of two: few tables for however many lengths.
        size = 1 << max(8, (stop - 1).bit_length())
        return self._tables.get((size, device), lambda: self._made(positions(size, ()), device))

    def rows(
        self, start: int, stop: int, blocks: Sequence[ImageBlock], device: torch.device
    ) -> Rope:
        """Angles of the tokens `[start, stop)` of a sequence with image blocks in it."""
        parts: list[Rope] = []
        at = start
        for block in sorted(blocks, key=lambda block: block.start):
            end = block.start + block.grid.cells
            if end <= at or block.start >= stop:
                continue
            if at < block.start:
                parts.append(self.text([(at, block.start)], device))
            at, last = max(at, block.start), min(end, stop)
            parts.append(self._image(block, device).cut(at - block.start, last - block.start))
            at = last
        if at < stop:
            parts.append(self.text([(at, stop)], device))
        return joined(parts)

    def _image(self, block: ImageBlock, device: torch.device) -> Rope:
        def made() -> Rope:
            return self._made(positions(end, [block])[block.start : end], device)

        end = block.start + block.grid.cells
        return self._tables.get((block.start, block.grid, device), made)

    def _made(self, yx_T2: Tensor, device: torch.device) -> Rope:
        made = rope(yx_T2, head_dim=self._head_dim, theta=self._theta)
        return Rope(sent(made.cos_TD, device), sent(made.sin_TD, device))


def joined(parts: Sequence[Rope]) -> Rope:
    """The rows of all parts, one after another."""
    if len(parts) == 1:
        return parts[0]
    return Rope(
        torch.cat([part.cos_TD for part in parts]), torch.cat([part.sin_TD for part in parts])
    )


def positions(length: int, blocks: Sequence[ImageBlock]) -> Tensor:
    """(y, x) of every token, int64 [length, 2]. Images neither compress nor shift the numbering."""
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


def rope(yx_T2: Tensor, *, head_dim: int, theta: float) -> Rope:
    """Rotation angles of positions [T, 2]: even frequencies turn with y, odd ones with x.

    The head_dim/2 angles are repeated twice along the last axis, for half-split rotation.
    """
    device = yx_T2.device
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = theta ** (-even / head_dim)
    axis = torch.arange(head_dim // 2, device=device) % 2
    angle = yx_T2.float()[:, axis] * frequency
    angle_TD = torch.cat([angle, angle], dim=-1)
    return Rope(angle_TD.cos(), angle_TD.sin())
