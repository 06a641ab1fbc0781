"""The transformer's weights: every key of its configuration and no other, safetensors only.

Files have the original names of Wan, whatever their folder's layout; some have diffusers'. Either
is read; names and shapes are checked in the headers before a byte of weight is.
"""

import re

import torch

from hyimg_cli.loading.checkpoint import check_tensors, tensor_index
from hyimg_cli.loading.unfilled import refuse_unfilled
from hyimg_cli.models.common.weights import fill, tensor_shapes
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout, Component
from hyimg_cli.models.diffusers_video.weights import LoadTarget, check_weights
from hyimg_cli.models.lingbot_world.layout import TRANSFORMER, NetworkShape, network_shape
from hyimg_cli.models.lingbot_world.network import IN_FLOAT32, LingBotNetwork

# From diffusers' names to the original ones, one after the other.
_ORIGINAL = (
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"scale_shift_table$", "modulation"),
    (r"^proj_out\.", "head.head."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.(text|time)_embedder\.linear_1\.", r"\1_embedding.0."),
    (r"^condition_embedder\.(text|time)_embedder\.linear_2\.", r"\1_embedding.2."),
)
_OF_ORIGINAL = "head.modulation"


def original_name(name: str) -> str:
    """Return the original name of a weight that has diffusers' name."""
    for pattern, replacement in _ORIGINAL:
        name = re.sub(pattern, replacement, name)
    return name


def check_all(layout: CheckpointLayout) -> int:
    """Return the number of weights of all parts. Raises CheckpointError."""
    parts = dict(layout.components)
    count = check_network(parts.pop(TRANSFORMER), network_shape(layout))
    return count + sum(check_weights(part) for part in parts.values() if part.has_weights)


def check_network(part: Component, shape: NetworkShape) -> int:
    """Return the number of weights. Raises CheckpointError unless they match the configuration."""
    network, _ = _match_files(part, shape)
    return sum(tensor.numel() for tensor in network.state_dict().values())


def load_network(part: Component, shape: NetworkShape, place: LoadTarget) -> LingBotNetwork:
    """Return the network, ready for inference, in `place`. Raises CheckpointError."""
    network, names = _match_files(part, shape)
    place.offload.unload()

    def dtype_of(name: str) -> torch.dtype:
        is_wide = any(part in IN_FLOAT32 for part in name.split("."))
        return torch.float32 if is_wide else place.dtype

    device = place.device if place.cpu_offload == "none" else torch.device("cpu")
    fill(network, part.folder, part.stem, names, dtype_of=dtype_of, device=device)
    place.put(network)
    return network


def _match_files(part: Component, shape: NetworkShape) -> tuple[LingBotNetwork, dict[str, str]]:
    """Return the network without memory for weights, and its names by those in the files.

    Raises CheckpointError unless the files have exactly these.
    """
    with torch.device("meta"):
        network = LingBotNetwork(shape)
    shapes = tensor_shapes(network)
    found = tensor_index(part.folder, part.stem)
    is_original = _OF_ORIGINAL in found
    names = {original_name(name) if is_original else name: name for name in shapes}
    expected = {stored: shapes[own] for stored, own in names.items()}
    check_tensors(found, expected, part.folder, part.name)
    refuse_unfilled(part.folder, found, part.name)
    return network, names
