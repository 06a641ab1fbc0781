"""Matrices that bitsandbytes has packed into 4 or 8 bits: what a checkpoint's files hold of them.

    4 bits   x.weight  x.weight.absmax  .quant_map  .quant_state.bitsandbytes__nf4 (or __fp4)
             twice packed also  x.weight.nested_absmax  .nested_quant_map
    8 bits   x.weight  x.SCB  x.weight_format

Each stands for one matrix, which is made whole as it is loaded (`readers`). No torch.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, PositiveInt, ValidationError
from safetensors import safe_open

from hyimg_cli.errors import CheckpointError
from hyimg_cli.loading.checkpoint import Packed, TensorInfo, tensor_index

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 10_000
_LEVELS_4, _LEVELS_8 = 16, 256


class _QuantState(BaseModel):
    """What bitsandbytes says of a 4-bit matrix, as far as it is read; nested: of packed scales."""

    shape: tuple[PositiveInt, PositiveInt]
    blocksize: PositiveInt
    nested_blocksize: PositiveInt | None = None
    nested_offset: FiniteFloat = 0.0


def stored_index(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, from its headers: of packed matrices these, not their parts.

    Raises CheckpointError, also for a packed matrix whose parts do not fit together.
    """
    found = tensor_index(folder)
    matrices: dict[str, TensorInfo] = {}
    for name in found:
        weight, is_state, kind = name.partition(_STATE)
        if is_state and kind in ("nf4", "fp4"):
            matrices[weight] = _matrix_of_4_bits(folder, weight, name, found)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            matrices[weight] = _matrix_of_8_bits(folder, weight, found)
    packed = [matrix.packed for matrix in matrices.values() if matrix.packed is not None]
    parts = {name for one in packed for name, _ in one.parts.values()}
    return {name: info for name, info in found.items() if name not in parts} | matrices


def _matrix_of_4_bits(
    folder: Path, name: str, state_name: str, found: Mapping[str, TensorInfo]
) -> TensorInfo:
    try:
        state = _QuantState.model_validate_json(_read(folder, state_name, found))
    except ValidationError as error:
        raise _fault(name, f"its state cannot be read: {error.errors()[0]['msg']}") from None
    (rows, columns), block = state.shape, state.blocksize
    count, nested = rows * columns, state.nested_blocksize
    if count % (2 * block):
        what = f"its state cannot be read: {rows} x {columns} in blocks of {block}"
        raise _fault(name, what)
    lengths = {"absmax": count // block, "quant_map": _LEVELS_4}
    if nested is not None:
        lengths["nested_absmax"] = math.ceil(count // block / nested)
        lengths["nested_quant_map"] = _LEVELS_8
    names = {"weight": name, "state": state_name} | {role: f"{name}.{role}" for role in lengths}
    parts = _parts(name, names, found)
    if found[name].bytes * 2 != count:
        raise _fault(
            name, f"it has {found[name].bytes} bytes, {rows} x {columns} need {count // 2}"
        )
    for role, length in lengths.items():
        _check_length(name, role, parts[role][1], length)
    packed = Packed(parts, state.nested_offset, nested or 1)
    nbytes = sum(info.bytes for _, info in parts.values())
    return TensorInfo((rows, columns), "F32", found[name].file, packed, bytes=nbytes)


def _matrix_of_8_bits(folder: Path, name: str, found: Mapping[str, TensorInfo]) -> TensorInfo:
    stem = name.removesuffix(".weight")
    names = {"weight": name, "SCB": f"{stem}.SCB"}
    if f"{stem}.weight_format" in found:
        names["format"] = f"{stem}.weight_format"
        if any(_read(folder, names["format"], found)):
            raise _fault(name, "its 8 bits are ordered for one kind of GPU")
    parts = _parts(name, names, found)
    shape = found[name].shape
    if found[name].dtype != "I8" or len(shape) != 2:
        raise _fault(name, f"it is {found[name].dtype} {list(shape)}, no matrix of 8-bit integers")
    _check_length(name, "SCB", parts["SCB"][1], shape[0])
    nbytes = sum(info.bytes for _, info in parts.values())
    return TensorInfo(shape, "F32", found[name].file, Packed(parts), bytes=nbytes)


def _read(folder: Path, name: str, found: Mapping[str, TensorInfo]) -> bytes:
    info = found[name]
    if info.dtype != "U8" or info.bytes > _MAX_STATE_BYTES:
        raise _fault(name, f"it is {info.dtype} of {info.bytes} bytes")
    with safe_open(folder / info.file, framework="np") as file:
        data: Any = file.get_tensor(name)
    return bytes(data.tobytes())


def _parts(
    name: str, names: Mapping[str, str], found: Mapping[str, TensorInfo]
) -> dict[str, tuple[str, TensorInfo]]:
    """A matrix's tensors by role. Raises CheckpointError where one is missing."""
    if lacking := [part for part in names.values() if part not in found]:
        raise _fault(name, f"{', '.join(lacking)} is missing")
    return {role: (part, found[part]) for role, part in names.items()}


def _check_length(name: str, role: str, info: TensorInfo, length: int) -> None:
    if info.shape != (length,):
        raise _fault(name, f"its {role} is {list(info.shape)}, expected {[length]}")


def _fault(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is packed by bitsandbytes, and {what}",
        hint="use the checkpoint as it was released; --quantization nf4 makes it smaller",
        code="checkpoint.quantized",
    )
