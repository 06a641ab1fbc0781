"""2-D rotary embedding: positions of a layout, their cosines and sines, and the rotation.

Text at absolute index p stands at (p, p), which is ordinary 1-D RoPE; image tokens stand on a grid
centred on the index range they occupy. Golden case 2.
"""

# Legend: T token, D head width, H head
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of some tokens, float32, [T, D]."""

    cos_TD: Tensor
    sin_TD: Tensor

    def padded(self, count: int) -> "Rope":
        """The same with rows of zeros up to `count`."""
        missing = (0, 0, 0, count - self.cos_TD.shape[0])
        return Rope(F.pad(self.cos_TD, missing), F.pad(self.sin_TD, missing))

    def to(self, device: torch.device) -> "Rope":
        return Rope(self.cos_TD.to(device), self.sin_TD.to(device))


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
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    axis = torch.arange(head_dim // 2) % 2
    angle = yx_T2.float()[:, axis] * frequency
    angle_TD = torch.cat([angle, angle], dim=-1)
    return Rope(angle_TD.cos(), angle_TD.sin())


def rotate(x_THD: Tensor, rope: Rope) -> Tensor:
    """Heads turned by their tokens' angles, float32; element i pairs with i + D/2."""
    x_THD = x_THD.float()
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_THD * rope.cos_TD[:, None] + turned * rope.sin_TD[:, None]
