"""The vision tower and its processor against those of transformers, to the bit."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

from hyimg_cli.errors import CheckpointError
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3.config import VisionArchitecture, architecture
from hyimg_cli.models.hunyuan_image3.vision import VisionTower, vision_features, vision_inputs

ARCH = VisionArchitecture(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_channels=3,
    patch_size=8,
    num_patches=25,
    max_num_patches=30,
    rescale_factor=1 / 255,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)
SIZES = ((64, 64), (30, 200), (200, 30), (5, 7), (301, 299), (1, 900), (40, 48))


def theirs(arch: VisionArchitecture) -> Any:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_channels", "patch_size", "num_patches", "layer_norm_eps")
    facts = {name: getattr(arch, name) for name in (*names, "vision_use_head")}
    return Siglip2VisionModel(Siglip2VisionConfig(**facts)).eval()


@pytest.mark.parametrize("size", SIZES)
def test_an_image_is_cut_as_theirs(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    uneven: dict[str, Any] = {"image_mean": (0.4, 0.5, 0.6), "image_std": (0.2, 0.3, 0.5)}
    arch = replace(ARCH, **uneven)
    found = vision_inputs(pixels, arch)
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in uneven.items()}
    expected = Siglip2ImageProcessor(patch_size=8, max_num_patches=30, **options)(
        torch.from_numpy(pixels).permute(2, 0, 1),
        return_tensors="pt",
        input_data_format="channels_first",
    )
    assert torch.equal(found.patches_1SP, expected["pixel_values"])
    assert torch.equal(found.is_real_1S, expected["pixel_attention_mask"])
    assert torch.equal(found.shapes_12, expected["spatial_shapes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 64), (30, 200), (40, 48)])
def test_features_are_theirs(size: tuple[int, int], dtype: torch.dtype) -> None:
    tower, their = VisionTower(ARCH).to(dtype).eval(), theirs(ARCH).to(dtype)
    tower.load_state_dict(their.state_dict())  # names and shapes are theirs as well
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    inputs = vision_inputs(pixels, ARCH)
    assert bool(inputs.is_real_1S.all()) == (size == (40, 48))
    with torch.no_grad():
        expected = their(
            inputs.patches_1SP.to(dtype), inputs.is_real_1S, inputs.shapes_12
        ).last_hidden_state
        assert torch.equal(vision_features(tower, inputs), expected)


@pytest.mark.parametrize("option", [("do_resize", False), ("resample", 3)])
def test_another_processor_is_refused(option: tuple[str, Any]) -> None:
    config = json.loads((registry.resolve_model(registry.EMBEDDED) / "config.json").read_text())
    config["vit_processor"] |= {option[0]: option[1]}
    with pytest.raises(CheckpointError, match=f"vit_processor.{option[0]}"):
        architecture(config)


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("vit", {"hidden_act": "gelu"}),
        ("vae", {"upsample_match_channel": False}),
        ("vae", {"ffactor_spatial": 8}),
        ("vit_aligner", {"depth": 3}),
    ],
)
def test_a_part_that_was_never_released_is_refused(part: str, option: dict[str, Any]) -> None:
    config = json.loads((registry.resolve_model(registry.EMBEDDED) / "config.json").read_text())
    config[part] |= option
    with pytest.raises(CheckpointError, match=f"{part}.{min(option)}"):
        architecture(config)


@pytest.mark.parametrize(
    "option",
    [
        {"moe_topk": [1, 2, 2, 2]},
        {"num_shared_expert": 2},
        {"use_mixed_mlp_moe": False},
        {"vae_downsample_factor": [16, 8]},
    ],
)
def test_layers_that_differ_are_refused(option: dict[str, Any]) -> None:
    config = json.loads((registry.resolve_model(registry.EMBEDDED) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=min(option)):
        architecture(config | option)
