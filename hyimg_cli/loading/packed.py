"""Matrices that bitsandbytes has packed into 4 or 8 bits: what a checkpoint's files hold of them.

    4 bits   x.weight  x.weight.absmax  .quant_map  .quant_state.bitsandbytes__nf4 (or __fp4)
             twice packed also  x.weight.nested_absmax  .nested_quant_map
    8 bits   x.weight  x.SCB  x.weight_format

Each stands for one matrix, which is made whole as it is loaded (`stream`). No torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import json_of
from hyimg_cli.loading.checkpoint import TensorInfo, tensor_index

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 10_000
_LEVELS_4, _LEVELS_8 = 16, 256


@dataclass(frozen=True)
class Packed:
    """One matrix [rows, columns]; `parts`: name and file of each tensor it is made of, by role.

    Where scales are packed themselves, so many share one, and `offset` was taken from each.
    """

    shape: tuple[int, int]
    parts: Mapping[str, tuple[str, str]]
    offset: float = 0.0
    nested_block: int = 1

    @property
    def is_4_bit(self) -> bool:
        return "quant_map" in self.parts


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensors by name, packed ones as the matrices that they stand for."""

    tensors: Mapping[str, TensorInfo]
    packed: Mapping[str, Packed]

    @property
    def parts(self) -> frozenset[str]:
        """Names of tensors that are part of a matrix, and none themselves."""
        every = {name for one in self.packed.values() for name, _ in one.parts.values()}
        return frozenset(every - self.packed.keys())


def stored_index(folder: Path) -> Stored:
    """Every tensor of the checkpoint, from its headers. Raises CheckpointError, also for a packed
    matrix whose parts do not fit together.
    """
    found = tensor_index(folder)
    packed = {}
    for name in found:
        weight, is_state, kind = name.partition(_STATE)
        if is_state and kind in ("nf4", "fp4"):
            packed[weight] = _of_4_bits(folder, weight, name, found)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            packed[weight] = _of_8_bits(folder, weight, found)
    stored = Stored(found, packed)
    kept = {name: info for name, info in found.items() if name not in stored.parts}
    for name, one in packed.items():
        size = sum(found[part].bytes for part, _ in one.parts.values())
        kept[name] = TensorInfo(one.shape, "F32", found[name].file, size)
    return replace(stored, tensors=kept)


def _of_4_bits(folder: Path, name: str, state_name: str, found: Mapping[str, TensorInfo]) -> Packed:
    try:
        state = json_of(_read(folder, state_name, found))
        rows, columns = (int(n) for n in state["shape"])
        block, is_nested = int(state["blocksize"]), "nested_blocksize" in state
        nested = int(state.get("nested_blocksize", 1))
        offset = float(state.get("nested_offset", 0.0))
        count = rows * columns
        blocks = count // block
        if min(rows, columns, block, nested) < 1 or count % (2 * block):
            raise ValueError(f"{rows} x {columns} in blocks of {block}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise _fault(name, f"its state cannot be read: {error}") from None
    lengths = {"absmax": blocks, "quant_map": _LEVELS_4}
    if is_nested:
        lengths |= {"nested_absmax": math.ceil(blocks / nested), "nested_quant_map": _LEVELS_8}
    parts = {"weight": name, "state": state_name} | {role: f"{name}.{role}" for role in lengths}
    _refuse_lacking(name, parts, found)
    if found[name].bytes * 2 != count:
        raise _fault(
            name, f"it has {found[name].bytes} bytes, {rows} x {columns} need {count // 2}"
        )
    for role, length in lengths.items():
        _refuse_other(name, role, found[parts[role]], (length,))
    return Packed((rows, columns), _placed(parts, found), offset, nested)


def _of_8_bits(folder: Path, name: str, found: Mapping[str, TensorInfo]) -> Packed:
    stem = name.removesuffix(".weight")
    parts = {"weight": name, "SCB": f"{stem}.SCB"}
    if f"{stem}.weight_format" in found:
        parts["format"] = f"{stem}.weight_format"
        if any(_read(folder, parts["format"], found)):
            raise _fault(name, "its 8 bits are ordered for one kind of GPU")
    _refuse_lacking(name, parts, found)
    shape = found[name].shape
    if found[name].dtype != "I8" or len(shape) != 2:
        raise _fault(name, f"it is {found[name].dtype} {list(shape)}, no matrix of 8-bit integers")
    _refuse_other(name, "SCB", found[parts["SCB"]], (shape[0],))
    return Packed((shape[0], shape[1]), _placed(parts, found))


def _read(folder: Path, name: str, found: Mapping[str, TensorInfo]) -> bytes:
    info = found[name]
    if info.dtype != "U8" or info.bytes > _MAX_STATE_BYTES:
        raise _fault(name, f"it is {info.dtype} of {info.bytes} bytes")
    with safe_open(folder / info.file, framework="np") as file:
        data: Any = file.get_tensor(name)
    return bytes(data.tobytes())


def _placed(
    parts: Mapping[str, str], found: Mapping[str, TensorInfo]
) -> dict[str, tuple[str, str]]:
    return {role: (name, found[name].file) for role, name in parts.items()}


def _refuse_lacking(name: str, parts: Mapping[str, str], found: Mapping[str, TensorInfo]) -> None:
    lacking = [part for part in parts.values() if part not in found]
    if lacking:
        raise _fault(name, f"{', '.join(lacking)} is missing")


def _refuse_other(name: str, role: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise _fault(name, f"its {role} is {list(info.shape)}, expected {list(shape)}")


def _fault(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is packed by bitsandbytes, and {what}",
        hint="use the checkpoint as it was released; --quantization nf4 makes it smaller",
        code="checkpoint.quantized",
    )
