"""Matrices that bitsandbytes has packed into 4 or 8 bits: what a checkpoint's files hold of them.

    4 bits   x.weight  x.weight.absmax  .quant_map  .quant_state.bitsandbytes__nf4 (or __fp4)
             twice packed also  x.weight.nested_absmax  .nested_quant_map
    8 bits   x.weight  x.SCB  x.weight_format

Each stands for one matrix, which is made whole as it is loaded (`readers`). No torch.
"""

import math
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, FiniteFloat, PositiveInt, ValidationError

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import Packed, TensorInfo, fault, readable, tensor_index

_STATE = ".weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 10_000
Tensors = dict[str, TensorInfo]
# A tensor's dtype and shape.
Kind = tuple[str, tuple[int, ...]]


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
            _join_4_bits(folder, tensors, f"{stem}.weight", name)
        elif name.endswith(".SCB"):
            _join_8_bits(folder, tensors, f"{name.removesuffix('SCB')}weight", name)
    return tensors


def _join_4_bits(folder: Path, tensors: Tensors, name: str, state_name: str) -> None:
    try:
        state = _QuantState.model_validate_json(_read(folder, tensors[state_name]))
    except ValidationError as error:
        raise _fault(name, f"its state cannot be read: {error.errors()[0]['msg']}") from None
    (rows, columns), block, nested = state.shape, state.blocksize, state.nested_blocksize
    stored, scales = tensors.get(name), rows * columns // block
    # A byte has two weights.
    if rows * columns % (2 * block) or stored is None or stored.bytes * 2 != rows * columns:
        nbytes = 0 if stored is None else stored.bytes
        what = f"its state says {rows} x {columns} in blocks of {block}; {nbytes} bytes are stored"
        raise _fault(name, what)
    kinds = {one: (tensors[one].dtype, tensors[one].shape) for one in (name, state_name)}
    kinds[f"{name}.absmax"] = ("U8" if nested else "F32", (scales,))
    kinds[f"{name}.quant_map"] = ("F32", (16,))
    if nested:
        kinds[f"{name}.nested_absmax"] = ("F32", (math.ceil(scales / nested),))
        kinds[f"{name}.nested_quant_map"] = ("F32", (256,))
    _join(tensors, name, kinds, state.shape, Packed({}, state.nested_offset, nested or 1))


def _join_8_bits(folder: Path, tensors: Tensors, name: str, scales_name: str) -> None:
    stored, order = tensors.get(name), tensors.get(f"{name}_format")
    if stored is None or stored.dtype != "I8" or len(stored.shape) != 2:
        raise _fault(name, "it is no matrix of 8-bit integers")
    kinds = {name: ("I8", stored.shape), scales_name: ("F32", stored.shape[:1])}
    if order is not None:
        kinds[f"{name}_format"] = (order.dtype, order.shape)
        if any(_read(folder, order)):
            raise _fault(name, "its 8 bits are ordered for one kind of GPU")
    _join(tensors, name, kinds, stored.shape, Packed({}))


def _read(folder: Path, info: TensorInfo) -> bytes:
    """The bytes of a small tensor."""
    with readable(folder / info.file), opened(folder / info.file) as file:
        file.seek(info.start)
        return file.read(min(info.bytes, _MAX_STATE_BYTES))


def _join(
    tensors: Tensors, name: str, kinds: dict[str, Kind], shape: tuple[int, ...], packed: Packed
) -> None:
    """Put a matrix in the place of its parts. Raises CheckpointError where one is missing, or not
    of its kind.
    """
    for part, (dtype, sides) in kinds.items():
        if (found := tensors.get(part)) is None:
            raise _fault(name, f"{part} is missing")
        if (found.dtype, found.shape) != (dtype, sides):
            what = f"{part} is {found.dtype} {list(found.shape)}, expected {dtype} {list(sides)}"
            raise _fault(name, what)
    # By the last word of their names.
    parts = {part.rpartition(".")[2]: (part, tensors.pop(part)) for part in kinds}
    file, nbytes = parts["weight"][1].file, sum(info.bytes for _, info in parts.values())
    packed = replace(packed, parts=parts)
    tensors[name] = TensorInfo(shape, "F32", file, bytes=nbytes, packed=packed)


def _fault(name: str, what: str) -> CheckpointError:
    hint = "use the checkpoint as it was released; --quantization nf4 makes it smaller"
    return fault("quantized", f"{name} is packed by bitsandbytes, and {what}", hint=hint)
