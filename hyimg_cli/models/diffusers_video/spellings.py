"""Give the tensors of a single file the names that its network's class has.

    the library's names         as they are
    the authors' names          by the library's own converter of the class
    FLUX.1's authors' names     by the table here: the library's has one width written into it

Tensors are spelled one by one: one may become several (q, k and v), and one that no class needs
becomes none. Headers are spelled as tensors without values, by the same code.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor

from hyimg_cli.errors import HyimgError
from hyimg_cli.loading.checkpoint import TensorInfo, fault

_FLUX1 = "FluxTransformer2DModel"
# From FLUX.1's authors' names of layers to the library's, one after the other.
_FLUX1_LAYERS = (
    (r"^img_in$", "x_embedder"),
    (r"^txt_in$", "context_embedder"),
    (r"^time_in\.", "time_text_embed.timestep_embedder."),
    (r"^vector_in\.", "time_text_embed.text_embedder."),
    (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
    (r"\.in_layer$", ".linear_1"),
    (r"\.out_layer$", ".linear_2"),
    (r"^double_blocks\.", "transformer_blocks."),
    (r"^single_blocks\.", "single_transformer_blocks."),
    (r"\.img_mod\.lin$", ".norm1.linear"),
    (r"\.txt_mod\.lin$", ".norm1_context.linear"),
    (r"\.modulation\.lin$", ".norm.linear"),
    (r"\.img_attn\.norm\.(query|key)_norm$", r".attn.norm_\1"),
    (r"\.txt_attn\.norm\.(query|key)_norm$", r".attn.norm_added_\1"),
    (r"\.norm\.(query|key)_norm$", r".attn.norm_\1"),
    (r"\.norm_(added_)?(q|k)\w+$", r".norm_\1\2"),
    (r"\.img_attn\.proj$", ".attn.to_out.0"),
    (r"\.txt_attn\.proj$", ".attn.to_add_out"),
    (r"\.img_mlp\.0$", ".ff.net.0.proj"),
    (r"\.img_mlp\.2$", ".ff.net.2"),
    (r"\.txt_mlp\.0$", ".ff_context.net.0.proj"),
    (r"\.txt_mlp\.2$", ".ff_context.net.2"),
    (r"\.linear2$", ".proj_out"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
)
# Layers that the library has apart: of how many equal parts, and how many each takes.
_FLUX1_APART = {
    ".img_attn.qkv": {".attn.to_q": 1, ".attn.to_k": 1, ".attn.to_v": 1},
    ".txt_attn.qkv": {".attn.add_q_proj": 1, ".attn.add_k_proj": 1, ".attn.add_v_proj": 1},
    ".linear1": {".attn.to_q": 1, ".attn.to_k": 1, ".attn.to_v": 1, ".proj_mlp": 4},
}
Spelled = dict[str, Tensor]


@dataclass(frozen=True)
class Spelling:
    """Tensors by the names of their class, and for each the stored name it comes from."""

    tensors: Spelled
    origins: Mapping[str, str]


def spelled(
    stored: Mapping[str, Tensor], expected: Set[str], class_name: str, path: Path
) -> Spelling:
    """Return the tensors of the file `path` by the names in `expected`.

    A tensor with no name there keeps the stored one. Raises CheckpointError for two stored tensors
    that are one.
    """
    convert = _converter(class_name)
    tensors, origins = Spelled(), dict[str, str]()
    for name, tensor in stored.items():
        made = {name: tensor} if name in expected else _converted(convert, name, tensor)
        if not made.keys() <= expected:
            made = {name: tensor}
        for own, one in made.items():
            if own in tensors:
                what = f"{path.name} has {own} twice: as {origins[own]} and as {name}"
                raise fault("mismatch", what, path, "use the file as its authors made it")
            tensors[own], origins[own] = one, name
    return Spelling(tensors, origins)


def spelled_headers(
    stored: Mapping[str, TensorInfo], expected: Set[str], class_name: str, path: Path
) -> dict[str, TensorInfo]:
    """Return the headers of the file `path` by the names in `expected`. Raises CheckpointError."""
    empty = {name: torch.empty(one.shape, device="meta") for name, one in stored.items()}
    found = spelled(empty, expected, class_name, path)
    return {
        name: TensorInfo(tuple(one.shape), stored[found.origins[name]].dtype, path.name)
        for name, one in found.tensors.items()
    }


def _converted(convert: Callable[[Spelled], Spelled], name: str, tensor: Tensor) -> Spelled:
    try:
        return convert({name: tensor})
    except (HyimgError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # converters index and split what they do not expect
        return {name: tensor}


@cache
def _converter(class_name: str) -> Callable[[Spelled], Spelled]:
    if class_name == _FLUX1:
        return lambda one: dict(pair for name in one for pair in _from_flux1(name, one[name]))
    own: Any = SINGLE_FILE_LOADABLE_CLASSES.get(class_name)
    if own is None:
        return dict
    convert: Callable[..., Spelled] = own["checkpoint_mapping_fn"]
    return lambda one: convert(checkpoint=one)


def _from_flux1(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of FLUX.1's authors by the library's names."""
    layer, _, kind = name.rpartition(".")
    kind = "weight" if kind == "scale" else kind
    for end, parts in _FLUX1_APART.items():
        if layer.endswith(end):
            block = _flux1_layer(layer.removesuffix(end))
            unit = len(tensor) // sum(parts.values())
            pieces = tensor.split([unit * count for count in parts.values()])
            for part, piece in zip(parts, pieces, strict=True):
                yield f"{block}{part}.{kind}", piece
            return
    own = _flux1_layer(layer)
    if own == "norm_out.linear":
        # Its authors have the shift first, the library the scale.
        tensor = torch.cat([*reversed(tensor.chunk(2))])
    yield f"{own}.{kind}", tensor


def _flux1_layer(layer: str) -> str:
    for pattern, replacement in _FLUX1_LAYERS:
        layer = re.sub(pattern, replacement, layer)
    return layer
