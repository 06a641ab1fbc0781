"""Files of weights as other people's tools write them: headers and zeros, without a library."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from hyimg_cli.loading.gguf_header import TYPES

BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I8": 8, "U8": 8, "I64": 64, "I32": 32}
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
Named = Sequence[str] | Mapping[str, tuple[str, Sequence[int]]]


def _typed(tensors: Named, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    return dict(tensors) if isinstance(tensors, Mapping) else dict.fromkeys(tensors, (dtype, shape))


def safetensors(path: Path, tensors: Named, **metadata: str) -> Path:
    """Write a safetensors file; `tensors`: names, or their dtypes and shapes by name."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, (dtype, shape) in _typed(tensors, "BF16", (2, 2)).items():
        stop = start + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(start))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, value: str | int | Sequence[str]) -> bytes:
    """Return a key of GGUF: a text, a number of 32 bits, or a list of texts."""
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def gguf(
    path: Path,
    tensors: Named,
    keys: Sequence[bytes] = (),
    *,
    version: int = 3,
    missing: int = 0,
    is_hole: bool = False,
) -> Path:
    """Write a GGUF file of zeros without its last `missing` bytes; `is_hole`: not on the disk."""
    body, offset = b"", 0
    typed = _typed(tensors, "Q4_K", (1, 256))
    for name, (dtype, shape) in typed.items():
        number = NUMBERS.get(dtype) or int(dtype.isdecimal() and dtype)
        body += text(name) + struct.pack("<I", len(shape))
        body += b"".join(struct.pack("<Q", side) for side in reversed(shape))
        body += struct.pack("<IQ", number, offset)
        _, block, size = TYPES.get(number, ("", 1, 1))
        offset += -(prod(shape) // block * size // -32) * 32
    start = b"GGUF" + struct.pack("<IQQ", version, len(typed), len(keys)) + b"".join(keys) + body
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_hole:
        path.write_bytes(start)
        os.truncate(path, len(start) + -len(start) % 32 + offset)
        return path
    data = start + bytes(-len(start) % 32) + bytes(offset)
    path.write_bytes(data[: len(data) - missing])
    return path
