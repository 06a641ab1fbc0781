"""Write one component: its configuration as given, weights from names alone.

numpy draws the weights from a seed made of the seed and the tensor's name, instead of the
libraries' own initialisation, so that no library version changes a byte.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

DtypeOf = Callable[[str], torch.dtype]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON file, with keys as given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(path: Path, build: Callable[[], nn.Module], seed: str, dtype: DtypeOf) -> None:
    """Write random weights of the module that `build` makes, as one safetensors file."""
    with torch.device("meta"):
        module = build()
    tied: set[str] = set(getattr(module, "_tied_weights_keys", None) or ())
    tensors = {
        name: drawn(f"{seed}/{name}", tuple(meta.shape)).to(dtype(name))
        for name, meta in module.state_dict().items()
        if name not in tied
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw a weight: ones for norms' scales, near zero for biases, else variance 1 / fan-in."""
    generator = np.random.default_rng(
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    )
    values = generator.standard_normal(shape, dtype=np.float32)
    last = name.rsplit("/", 1)[-1].split(".")
    if last[-1] == "gamma" or (len(shape) == 1 and last[-1] == "weight"):
        return torch.ones(shape)
    if len(shape) <= 1:
        return torch.from_numpy(values) * 0.02
    return torch.from_numpy(values) / math.sqrt(math.prod(shape[1:]))


def bfloat16(_name: str) -> torch.dtype:
    return torch.bfloat16
