"""What configurations of several families have; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyimg_cli.loading.config import Config


@dataclass(frozen=True, kw_only=True)
class VitShape:
    """Numbers of a ViT, by the keys of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


def refuse_unreleased(config: Config, released: Mapping[str, Any]) -> None:
    """Passes a configuration whose keys, where it has them, say what was `released`: other values
    exist in unreleased code alone, and would be computed wrongly. Raises CheckpointError.
    """
    for key, only in released.items():
        value = config.values.get(key)
        if value is not None and value != only:
            raise config.fault(key, value, f"{only!r}, the only one that was released")
