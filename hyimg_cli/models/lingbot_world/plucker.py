"""Rays of a camera path as the network reads them: 6 numbers a pixel, folded onto the latent grid.

No cross product: a ray is its origin and its direction, both as seen from the frame before.
"""

# Legend: F latent frame, Y X latent rows and columns, H W pixels, C channels, S tokens
import torch
from torch import Tensor

from hyimg_cli.spec.job import Size

FOLD = 8
CHANNELS = 6 * FOLD * FOLD


def rays(poses_F44: Tensor, intrinsics: tuple[float, float, float, float], size: Size) -> Tensor:
    """Origin and unit direction of each pixel's ray, [F, H, W, 6]."""
    fx, fy, cx, cy = intrinsics
    dtype, device = poses_F44.dtype, poses_F44.device
    x_W = (torch.arange(size.width, dtype=dtype, device=device) + 0.5 - cx) / fx
    y_H = (torch.arange(size.height, dtype=dtype, device=device) + 0.5 - cy) / fy
    y_HW, x_HW = torch.meshgrid(y_H, x_W, indexing="ij")
    seen_HW3 = torch.stack([x_HW, y_HW, torch.ones_like(x_HW)], dim=-1)
    seen_HW3 = seen_HW3 / seen_HW3.norm(dim=-1, keepdim=True)
    directions_FHW3 = torch.einsum("hwi,fji->fhwj", seen_HW3, poses_F44[:, :3, :3])
    origins_FHW3 = poses_F44[:, None, None, :3, 3].expand_as(directions_FHW3)
    return torch.cat([origins_FHW3, directions_FHW3], dim=-1)


def plucker(poses_F44: Tensor, intrinsics: tuple[float, float, float, float], size: Size) -> Tensor:
    """Rays on the latent grid, [C, F, Y, X]; channels are component, pixel row, pixel column."""
    of_pixels = rays(poses_F44, intrinsics, size)
    folded: Tensor = of_pixels.unflatten(2, (-1, FOLD)).unflatten(1, (-1, FOLD))
    # frames, latent rows, pixel rows, latent columns, pixel columns, components
    return folded.permute(5, 2, 4, 0, 1, 3).flatten(0, 2)


def patches(grid_BCFYX: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Tokens [B, S, C times a patch's cells] of a grid, in the order of a convolution's weights."""
    across: Tensor = grid_BCFYX.unflatten(4, (-1, patch[2])).unflatten(3, (-1, patch[1]))
    split: Tensor = across.unflatten(2, (-1, patch[0]))
    # batch, channels, then (frame, in patch), (row, in patch), (column, in patch)
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
