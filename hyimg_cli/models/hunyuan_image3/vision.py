"""The ViT side of a source image: the tower of Siglip2 and its NaFlex processor.

Both give the results of transformers' own, to the bit (tests), whose import takes longer than
loading a small model. Source: `models/siglip2` of transformers.
"""

# Legend: B image, S image token (patch slot), M width, P numbers of a patch
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.transfer import sent
from hyimg_cli.models.common.layers import VitEncoder, VitMlp
from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.config import VisionArchitecture


@dataclass(frozen=True)
class VisionInputs:
    """Patches [1, S, P], which of the S slots are real, and the patch grid."""

    patches_1SP: Tensor
    is_real_1S: Tensor
    shapes_12: Tensor

    @property
    def grid(self) -> Grid:
        rows, columns = self.shapes_12[0].tolist()
        return Grid(rows, columns)


class VisionTower(nn.Module):
    """A ViT whose position embeddings are resized to each image's grid of patches.

    Parameter names equal the checkpoint's below `vision_model.`; an unused pooling head is held if
    the checkpoint has one.
    """

    def __init__(self, arch: VisionArchitecture) -> None:
        super().__init__()
        self.embeddings = _Embeddings(arch)
        self.encoder = VitEncoder(arch)
        self.post_layernorm = nn.LayerNorm(arch.hidden_size, eps=arch.layer_norm_eps)
        if arch.vision_use_head:
            self.head = _PoolingHead(arch)

    def forward(self, patches_BSP: Tensor, is_real_BS: Tensor, shapes_B2: Tensor) -> Tensor:
        """Return features of every slot, [B, S, M]; padding slots are masked as keys."""
        x_BSM = self.embeddings(patches_BSP, shapes_B2)
        # Evaluated on its own device, usually the host, so nothing waits for a GPU.
        mask_B11S = None
        if not bool(is_real_BS.all()):
            mask_B11S = sent(is_real_BS[:, None, None].bool(), x_BSM.device)
        return self.post_layernorm(self.encoder(x_BSM, mask_B11S))


class _Embeddings(nn.Module):
    def __init__(self, arch: VisionArchitecture) -> None:
        super().__init__()
        numbers, width = arch.num_channels * arch.patch_size**2, arch.hidden_size
        self.patch_embedding = nn.Linear(numbers, width)
        self.position_embedding = nn.Embedding(arch.num_patches, width)
        nn.init.normal_(self.position_embedding.weight, std=width**-0.5)

    def forward(self, patches_BSP: Tensor, shapes_B2: Tensor) -> Tensor:
        rows_BSM: Tensor = self.patch_embedding(patches_BSP)
        slots = rows_BSM.shape[1]
        return rows_BSM + torch.stack([self._positions(grid, slots) for grid in shapes_B2.tolist()])

    def _positions(self, grid: list[int], slots: int) -> Tensor:
        """Return an image's position embeddings, [S, M]; padding has the first one's."""
        weight = self.position_embedding.weight
        side = int(weight.shape[0] ** 0.5)
        map_1MYX = weight.view(side, side, -1).permute(2, 0, 1)[None]
        if weight.device.type == "cpu":
            map_1MYX = map_1MYX.float()  # a CPU cannot resize smaller types with antialiasing
        resized = F.interpolate(map_1MYX, size=grid, mode="bilinear", antialias=True)
        rows_NM = resized.flatten(2)[0].mT.to(weight.dtype)
        return torch.cat([rows_NM, rows_NM[:1].expand(slots - len(rows_NM), -1)])


class _PoolingHead(nn.Module):
    """Weights only: the network reads the features of patches instead."""

    def __init__(self, arch: VisionArchitecture) -> None:
        super().__init__()
        width = arch.hidden_size
        self.probe = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, arch.num_attention_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=arch.layer_norm_eps)
        self.mlp = VitMlp(arch)


def vision_inputs(pixels: np.ndarray, arch: VisionArchitecture) -> VisionInputs:
    """Return patches of an RGB uint8 image [H, W, 3], resized to the patch limit."""
    side = arch.patch_size
    grid = _grid(pixels.shape[0], pixels.shape[1], arch)
    size = [grid.rows * side, grid.columns * side]
    image_CYX = torch.from_numpy(pixels).permute(2, 0, 1)
    if [*image_CYX.shape[1:]] != size:
        # Rounded to whole levels: a float would differ in the last bits.
        image_CYX = F.interpolate(image_CYX[None], size=size, mode="bilinear", antialias=True)[0]
    mean_C11, std_C11 = (
        (torch.tensor(levels) * (1.0 / arch.rescale_factor))[:, None, None]
        for levels in (arch.image_mean, arch.image_std)
    )
    image_CYX = (image_CYX - mean_C11) / std_C11
    split = image_CYX.unflatten(2, (grid.columns, side)).unflatten(1, (grid.rows, side))
    patches_NP = split.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
    count, slots = len(patches_NP), arch.max_num_patches
    return VisionInputs(
        F.pad(patches_NP, (0, 0, 0, slots - count))[None],
        (torch.arange(slots) < count).int()[None],
        torch.tensor([[grid.rows, grid.columns]]),
    )


def _grid(height: int, width: int, arch: VisionArchitecture) -> Grid:
    """Return the patches of the largest image of that shape within the limit.

    Searches for its scale.
    """
    eps, side = 1e-5, arch.patch_size

    def cells(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(length * scale / side)) for length in (height, width))
        return rows, columns

    least, most = eps / 10, 100.0
    while most - least >= eps:
        scale = (least + most) / 2
        rows, columns = cells(scale)
        if rows * columns <= arch.max_num_patches:
            least = scale
        else:
            most = scale
    return Grid(*cells(least))


def vision_features(tower: VisionTower, inputs: VisionInputs) -> Tensor:
    """Return features of every slot, [1, S, M]; padding is masked as keys."""
    weight = tower.embeddings.patch_embedding.weight
    patches_1SP = sent(inputs.patches_1SP, weight.device).to(weight.dtype)
    return tower(patches_1SP, inputs.is_real_1S, inputs.shapes_12)
