"""Matrices that bitsandbytes has packed into 4 or 8 bits: what a checkpoint's files hold of them.

    4 bits   x.weight  x.weight.absmax  .quant_map  .quant_state.bitsandbytes__nf4 (or __fp4)
             twice packed also  x.weight.nested_absmax  .nested_quant_map
    8 bits   x.weight  x.SCB  x.weight_format

Each stands for one matrix, which is made whole as it is loaded (`readers`). No torch.
"""

import math
from pathlib import Path

from pydantic import BaseModel, FiniteFloat, PositiveInt, ValidationError

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import Packed, TensorInfo, fault, readable, tensor_index

_STATE = ".weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 10_000
Tensors = dict[str, TensorInfo]


class _QuantState(BaseModel):
    """What bitsandbytes says of a 4-bit matrix, as far as it is read; nested: of packed scales."""

    shape: tuple[PositiveInt, PositiveInt]
    blocksize: PositiveInt
    nested_blocksize: PositiveInt | None = None
    nested_offset: FiniteFloat = 0.0


def stored_index(folder: Path) -> Tensors:
    """Every tensor of the checkpoint, from its headers: of packed matrices these, not their parts.

    Raises CheckpointError, also for a packed matrix whose parts do not fit together.
    """
    tensors = tensor_index(folder)
    for name in list(tensors):
        stem, is_state, kind = name.partition(_STATE)
        if is_state and kind in ("nf4", "fp4"):
            packed = _take_4_bits(folder, tensors, f"{stem}.weight", name)
        elif name.endswith(".SCB"):
            packed = _take_8_bits(folder, tensors, f"{name.removesuffix('SCB')}weight", name)
        else:
            continue
        weight, stored = packed.parts["weight"]
        nbytes = sum(info.bytes for _, info in packed.parts.values())
        tensors[weight] = TensorInfo(packed.shape, "F32", stored.file, bytes=nbytes, packed=packed)
    return tensors


def _take_4_bits(folder: Path, tensors: Tensors, name: str, state_name: str) -> Packed:
    try:
        state = _QuantState.model_validate_json(_read(folder, tensors[state_name]))
    except ValidationError as error:
        raise _fault(name, f"its state cannot be read: {error.errors()[0]['msg']}") from None
    (rows, columns), block, nested = state.shape, state.blocksize, state.nested_blocksize
    stored, scales = tensors.get(name), rows * columns // block
    if stored is None:
        raise _fault(name, "what it packs is missing")
    # A byte has two weights.
    if rows * columns % (2 * block) or stored.bytes * 2 != rows * columns:
        says = f"{rows} x {columns} in blocks of {block}"
        what = f"its state says {says}; {stored.bytes} bytes are stored"
        raise _fault(name, what)
    kinds = {f"{name}.absmax": f"{'U8' if nested else 'F32'} [{scales}]"}
    kinds[f"{name}.quant_map"] = "F32 [16]"
    if nested:
        kinds[f"{name}.nested_absmax"] = f"F32 [{math.ceil(scales / nested)}]"
        kinds[f"{name}.nested_quant_map"] = "F32 [256]"
    parts = _take(tensors, [name, state_name], kinds)
    return Packed(state.shape, parts, state.nested_offset, nested or 1)


def _take_8_bits(folder: Path, tensors: Tensors, name: str, scales_name: str) -> Packed:
    stored, order = tensors.get(name), tensors.get(f"{name}_format")
    if stored is None or stored.dtype != "I8" or len(stored.shape) != 2:
        raise _fault(name, "it is no matrix of 8-bit integers")
    if order is not None and any(_read(folder, order)):
        raise _fault(name, "its 8 bits are ordered for one kind of GPU")
    names = [name, f"{name}_format"] if order else [name]
    return Packed(stored.shape, _take(tensors, names, {scales_name: f"F32 [{stored.shape[0]}]"}))


def _read(folder: Path, info: TensorInfo) -> bytes:
    """The bytes of a small tensor."""
    with readable(folder / info.file), opened(folder / info.file) as file:
        file.seek(info.start)
        return file.read(min(info.bytes, _MAX_STATE_BYTES))


def _take(
    tensors: Tensors, names: list[str], kinds: dict[str, str]
) -> dict[str, tuple[str, TensorInfo]]:
    """Take the parts of a matrix out of `tensors`: it and others by name, and those that must be of
    these kinds. By the last word of their names. Raises CheckpointError.
    """
    for part, kind in kinds.items():
        found = tensors.get(part)
        said = f"{found.dtype} {list(found.shape)}" if found else "missing"
        if said != kind:
            raise _fault(names[0], f"{part} is {said}, expected {kind}")
    return {part.rpartition(".")[2]: (part, tensors.pop(part)) for part in (*names, *kinds)}


def _fault(name: str, what: str) -> CheckpointError:
    hint = "use the checkpoint as it was released; --quantization nf4 makes it smaller"
    return fault("quantized", f"{name} is packed by bitsandbytes, and {what}", hint=hint)
