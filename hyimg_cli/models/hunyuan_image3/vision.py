"""The ViT side of a source image: transformers' Siglip2 tower and its NaFlex processor."""

# Legend: S image token (patch slot), M width
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

from hyimg_cli.kernels.transfer import sent
from hyimg_cli.models.hunyuan_image3.config import VisionArchitecture
from hyimg_cli.models.hunyuan_image3.sequence import Grid


@dataclass(frozen=True)
class VisionInputs:
    """Patches [1, S, P*P*3], which of the S slots are real, and the patch grid."""

    patches_1SP: Tensor
    is_real_1S: Tensor
    shapes_12: Tensor

    @property
    def grid(self) -> Grid:
        rows, columns = self.shapes_12[0].tolist()
        return Grid(rows, columns)


def vision_model(arch: VisionArchitecture) -> Siglip2VisionModel:
    """The tower, whose parameter names equal the checkpoint's below `vision_model.`."""
    config = Siglip2VisionConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_hidden_layers,
        num_attention_heads=arch.num_attention_heads,
        num_channels=arch.num_channels,
        patch_size=arch.patch_size,
        num_patches=arch.num_patches,
        hidden_act=arch.hidden_act,
        layer_norm_eps=arch.layer_norm_eps,
        attention_dropout=arch.attention_dropout,
        vision_use_head=arch.vision_use_head,
    )
    return Siglip2VisionModel(config)


def vision_inputs(pixels: np.ndarray, arch: VisionArchitecture) -> VisionInputs:
    """Patches of an RGB uint8 image [H, W, 3], resized to the largest size the patch limit
    allows.
    """
    options: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in arch.processor}
    processor = Siglip2ImageProcessor(**options)
    batch = processor(
        torch.from_numpy(pixels).permute(2, 0, 1),
        return_tensors="pt",
        input_data_format="channels_first",
    )
    return VisionInputs(
        batch["pixel_values"], batch["pixel_attention_mask"], batch["spatial_shapes"]
    )


def vision_features(tower: Siglip2VisionModel, inputs: VisionInputs) -> Tensor:
    """Features of every slot, padding included, [1, S, M]; padding is hidden from attention as
    keys.
    """
    weight = tower.embeddings.patch_embedding.weight
    output = tower(
        pixel_values=sent(inputs.patches_1SP, weight.device).to(weight.dtype),
        pixel_attention_mask=sent(inputs.is_real_1S, weight.device),
        # Left where they are: the tower reads them as numbers.
        spatial_shapes=inputs.shapes_12,
    )
    features: Tensor = output.last_hidden_state
    return features
