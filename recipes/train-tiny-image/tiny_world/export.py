"""Export a trained network as a checkpoint in the official layout, ready to embed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from tiny_world.architecture import RATIO_INDEX, checkpoint_config, generation_config
from tiny_world.heldout import is_held_out
from tiny_world.scenes import Scene
from tiny_world.tokenizer import write_tokenizer


@dataclass(frozen=True)
class Provenance:
    """How the weights were made, for the model card."""

    is_trained: bool
    scenes_seen: frozenset[Scene]
    model_card: str


def export(
    network: HunyuanImage3ForCausalMM, tokenizer: Tokenizer, provenance: Provenance, folder: Path
) -> None:
    """Write the checkpoint: config, weights in bfloat16 (router float32), tokenizer, cards."""
    leaked = [scene for scene in provenance.scenes_seen if is_held_out(scene)]
    assert not leaked, f"held-out scenes were trained: {leaked[:3]}"
    folder.mkdir(parents=True, exist_ok=True)
    scaling_factor = network.arch.vae.scaling_factor
    _write_json(folder / "config.json", checkpoint_config(tokenizer, scaling_factor))
    _write_json(folder / "generation_config.json", generation_config(tokenizer))
    card = {
        "name": "tiny-image",
        "ratio_indices": [RATIO_INDEX],
        "trained": provenance.is_trained,
    }
    _write_json(folder / "card.json", card)
    write_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(provenance.model_card, encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(stored(network), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def stored(network: HunyuanImage3ForCausalMM) -> dict[str, Tensor]:
    """Return every tensor under its official name, in the dtype in which it is stored.

    The autoencoder only ever sees one frame, so its outer temporal taps are never read: zero.
    """
    tensors = {}
    for name, tensor in network.state_dict().items():
        tensor = tensor.detach().clone()
        if name.startswith("vae.") and tensor.ndim == 5 and tensor.shape[2] == 3:
            tensor[:, :, 0] = tensor[:, :, 2] = 0
        is_router = name.endswith(".gate.wg.weight")
        tensors[name] = tensor.to(torch.float32 if is_router else torch.bfloat16).contiguous()
    return tensors


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
