"""Find the stored parts of matrices that bitsandbytes packed into 4 or 8 bits.

    4 bits   x.weight  x.weight.absmax  .quant_map  .quant_state.bitsandbytes__nf4 (or __fp4)
             twice packed also  x.weight.nested_absmax  .nested_quant_map
    8 bits   x.weight  x.SCB  x.weight_format

Each is one matrix, which bitsandbytes unpacks as it is loaded (`readers`). No torch.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import opened
from hyimg_cli.loading.checkpoint import TensorInfo, fault, readable, tensor_index

Sizes = dict[str, int]


class _QuantState(BaseModel):
    """The state of a 4-bit matrix of bitsandbytes; nested: the state of its packed scales."""

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=2)]
    dtype: Literal["float16", "bfloat16", "float32"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    nested_blocksize: PositiveInt | None = None

    def sizes(self, name: str) -> Sizes:
        """Return the bytes of each part of the matrix `name`, except this state."""
        numbers = math.prod(self.shape)
        scales = math.ceil(numbers / self.blocksize)
        sizes = {name: math.ceil(numbers / 2), f"{name}.quant_map": 16 * 4}
        if self.nested_blocksize is None:
            return sizes | {f"{name}.absmax": scales * 4}
        outer = math.ceil(scales / self.nested_blocksize)
        nested = {f"{name}.nested_absmax": outer * 4, f"{name}.nested_quant_map": 256 * 4}
        return sizes | nested | {f"{name}.absmax": scales}


def stored_index(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint by its header; a packed matrix is one tensor.

    Raises CheckpointError, also for a packed matrix whose parts do not match.
    """
    tensors = tensor_index(folder)
    for part, info in list(tensors.items()):
        name, is_state, _ = part.partition(".quant_state.bitsandbytes__")
        if is_state:
            try:
                state = _QuantState.model_validate_json(_read(folder, info))
            except ValidationError as error:
                what = f"its state cannot be read: {error.errors()[0]['msg']}"
                raise _fault(name, what) from None
            shape, sizes = state.shape, {part: info.bytes, **state.sizes(name)}
        elif part.endswith(".SCB"):
            name = f"{part.removesuffix('SCB')}weight"
            shape, sizes = _shape_and_sizes(folder, tensors, name)
        else:
            continue
        for one, size in sizes.items():
            found = f"{tensors[one].bytes} bytes" if one in tensors else "missing"
            if found != f"{size} bytes":
                raise _fault(name, f"{one} is {found}, expected {size} bytes")
        parts = {one: tensors.pop(one) for one in sizes}
        file, nbytes = parts[name].file, sum(sizes.values())
        tensors[name] = TensorInfo(shape, "F32", file, bytes=nbytes, parts=parts)
    return tensors


def _shape_and_sizes(
    folder: Path, tensors: dict[str, TensorInfo], name: str
) -> tuple[tuple[int, ...], Sizes]:
    """Return the shape of an 8-bit matrix, and the bytes of its parts."""
    weight, order = tensors.get(name), tensors.get(f"{name}_format")
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        raise _fault(name, "it is not a matrix of 8-bit integers")
    if order and any(_read(folder, order)):
        raise _fault(name, "its 8-bit values are ordered for one kind of GPU")
    sizes = {name: weight.bytes, f"{name.removesuffix('weight')}SCB": weight.shape[0] * 4}
    return weight.shape, sizes | ({f"{name}_format": order.bytes} if order else {})


def _read(folder: Path, info: TensorInfo) -> bytes:
    """Return the bytes of a small tensor."""
    with readable(folder / info.file), opened(folder / info.file) as file:
        file.seek(info.start)
        return file.read(info.bytes)


def _fault(name: str, what: str) -> CheckpointError:
    hint = "use the original checkpoint; --quantization nf4 makes it smaller"
    return fault("quantized", f"{name} is packed by bitsandbytes, and {what}", hint=hint)
