"""A file's tensors, straight from its pages: nothing is read before it is asked for."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hyimg_cli.loading.packed import Packed, Stored


def stored_tensor(file: Any, path: Path, name: str, stored: Stored | None) -> Tensor:
    """One tensor of the opened `file` at `path`: a view of it, or a packed one's whole matrix."""
    packed = stored.packed.get(name) if stored else None
    if packed is None:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    here = set(file.keys())
    held = {
        role: file.get_tensor(part) if part in here else _read(path.parent / at, part)
        for role, (part, at) in packed.parts.items()
    }
    return whole(packed, held)


def whole(packed: Packed, held: dict[str, Tensor]) -> Tensor:
    """The matrix [rows, columns] of a packed one, float32, from its parts by role."""
    if not packed.is_4_bit:
        return held["weight"].float() * held["SCB"].float()[:, None] * (1 / 127)
    absmax = held["absmax"]
    if "nested_absmax" in held:
        each = held["nested_quant_map"].float()[absmax.int()]
        # The last block may be a part of one.
        outer = held["nested_absmax"].float().repeat_interleave(packed.nested_block)
        absmax = each * outer[: len(each)] + packed.offset
    # Two indices a byte, the even weight in its upper half.
    pairs = held["weight"].contiguous().flatten().view(torch.uint8)
    indices = torch.stack([pairs >> 4, pairs & 15], dim=-1).int()
    blocks = held["quant_map"].float()[indices].view(len(absmax), -1)
    return (blocks * absmax.float()[:, None]).view(packed.shape)


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
