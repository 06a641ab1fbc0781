"""Export a trained run in the official layout: the untrained checkpoint with files replaced.

Trained are the transformer, the autoencoder and its `scaling_factor`. Everything else is byte for
byte what `recipes/build-tiny-video` writes.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checkpoints import hunyuan_video15
from tiny_checkpoints.writing import DtypeOf
from torch import nn

from tiny_films.sample import Sampling
from tiny_films.world import FPS, FRAMES

WEIGHTS = "diffusion_pytorch_model.safetensors"
TRAINED_WEIGHTS = (f"transformer/{WEIGHTS}", f"vae/{WEIGHTS}")
# These differ from the untrained checkpoint's only in some values.
TRAINED_CONFIGS = ("card.json", "vae/config.json")


def export(
    network: nn.Module, vae: nn.Module, scaling_factor: float, base: Path, folder: Path
) -> None:
    """Write the checkpoint to `folder`, which must not exist."""
    shutil.copytree(base, folder)
    _write_json(folder / "vae" / "config.json", vae_config(scaling_factor))
    _write_json(folder / "card.json", card(Sampling().steps))
    _write(folder / "transformer" / WEIGHTS, network, hunyuan_video15.transformer_dtype)
    _write(folder / "vae" / WEIGHTS, vae, lambda _name: torch.bfloat16)


def vae_config(scaling_factor: float) -> dict[str, Any]:
    """Return the untrained configuration with the measured factor."""
    return hunyuan_video15.VAE | {"scaling_factor": scaling_factor}


def card(steps: int) -> dict[str, Any]:
    """Return the untrained card, marked as trained, with suitable defaults."""
    defaults = {
        "size": [64, 64],
        "num_frames": FRAMES,
        "fps": FPS,
        "num_inference_steps": steps,
    }
    return hunyuan_video15.CARD | {"trained": True, "defaults": defaults}


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of the trained weights, by file."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in TRAINED_WEIGHTS
    }


def _write(path: Path, module: nn.Module, dtype: DtypeOf) -> None:
    tensors = {
        name: tensor.detach().to(dtype(name)).contiguous()
        for name, tensor in module.state_dict().items()
    }
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.unlink()
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
