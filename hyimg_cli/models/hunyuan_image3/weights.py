"""Loading a checkpoint in the official layout: every key, no other, safetensors only.

Names and shapes are checked from the files' headers before a byte of weight is read; transformers
then loads the shards. Code that a checkpoint names (`auto_map`) is never looked at: the class is
ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import (
    check_against,
    check_floating,
    refuse_special,
    tensor_index,
)
from hyimg_cli.models.hunyuan_image3.config import Architecture, architecture, read_json
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM, transformers_config
from hyimg_cli.models.hunyuan_image3.placement import refuse_outside
from hyimg_cli.models.hunyuan_image3.quantized import load_quantized
from hyimg_cli.spec.run import Quantization


def load(
    folder: Path,
    *,
    dtype: torch.dtype,
    device_map: str | None = None,
    quantization: Quantization = "none",
) -> HunyuanImage3ForCausalMM:
    """The network of `folder` in `dtype`, ready for inference. The router and the VAE stay float32.

    `device_map` as in transformers: None for the CPU, "cuda:0" for one GPU, "balanced" for all of
    them. `quantization` holds the routed experts in fewer bits. Raises CheckpointError where files
    are missing, broken, pickled, of another shape, or quantised already.
    """
    arch = checked(folder)
    if quantization == "none":
        network = _as_stored(folder, arch, dtype, device_map)
    else:
        network = load_quantized(
            folder, arch, dtype=dtype, device_map=device_map, form=quantization
        )
    return made_ready(network, quantization)


def checked(folder: Path) -> Architecture:
    """The architecture of `folder`, whose files hold every tensor of it and no other.

    Raises CheckpointError.
    """
    arch = architecture(read_json(folder, "config.json"), where=f"{folder.name}/config.json")
    found = tensor_index(folder)
    check_against(found, expected_shapes(arch))
    check_floating(found)
    return arch


def made_ready(
    network: HunyuanImage3ForCausalMM, quantization: Quantization
) -> HunyuanImage3ForCausalMM:
    """The network whose layers have their weights, with kernels chosen, for inference."""
    network.requires_grad_(False)
    for layer in network.model.layers:
        if quantization == "none":
            layer.mlp.stack()
        else:
            layer.mlp.choose()
    network.model.choose_kernels()
    network.eval()
    return network


def _as_stored(
    folder: Path, arch: Architecture, dtype: torch.dtype, device_map: str | None
) -> HunyuanImage3ForCausalMM:
    refuse_special(folder)
    with _quiet_transformers():
        loaded: Any = HunyuanImage3ForCausalMM.from_pretrained(
            folder,
            config=transformers_config(arch),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            device_map=device_map,
            attn_implementation="sdpa",
        )
    network: HunyuanImage3ForCausalMM = loaded[0]
    _refuse_leftovers(loaded[1])
    if torch.cuda.is_available():
        refuse_outside(getattr(network, "hf_device_map", {}))
    return network


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this architecture holds, without allocating any."""
    with torch.device("meta"):
        network = HunyuanImage3ForCausalMM(transformers_config(arch))
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _refuse_leftovers(report: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            names = ", ".join(str(name) for name in list(report[kind])[:5])
            raise CheckpointError(
                f"loading left {kind.replace('_', ' ')}: {names}", code="checkpoint.not-strict"
            )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar of the library's own: stderr belongs to the caller's progress."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
