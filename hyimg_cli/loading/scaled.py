"""Find the scales of matrices that a single file stores in 8 bits, as ComfyUI writes them.

    x.weight (F8_E4M3, F8_E5M2)   x.scale_weight or x.weight_scale   one number, or one per row
    x.scale_input or x.input_scale    how ComfyUI rounds what goes in; not used here
    x.comfy_quant                     JSON of a layer: its format
    scaled_fp8                        a mark of the file

A matrix is its numbers times its scale. It is unpacked as it is loaded (`readers`), so it takes the
memory of an unpacked one. No torch.
"""

import json
from collections.abc import Mapping

from hyimg_cli.errors import CheckpointError
from hyimg_cli.files import json_of, opened
from hyimg_cli.loading.checkpoint import FLOATS, TensorInfo, fault, readable
from hyimg_cli.loading.single_file import SingleFile

_FP8 = ("F8_E4M3", "F8_E5M2")
_WEIGHT, _SCALES = "weight", ("scale_weight", "weight_scale")
_INPUTS, _LAYER, _MARK = ("scale_input", "input_scale"), "comfy_quant", "scaled_fp8"
_METADATA = "_quantization_metadata"
# ComfyUI's names of the formats.
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_HINT = "download the BF16 file, an fp8 file with scales, or a GGUF such as Q4_K_M or Q8_0"


def unscaled_index(file: SingleFile, prefix: str = "") -> dict[str, TensorInfo]:
    """Return a file's tensors without the `prefix` of their names; an 8-bit matrix has its scale.

    Raises CheckpointError for a matrix in 8 bits whose scale is missing or is of another kind.
    """
    _refuse_formats(file, _formats_in_header(file))
    found = dict(file.tensors)
    for name, info in file.tensors.items():
        layer, _, own = name.rpartition(".")
        if own == _MARK:
            found.pop(name)
        elif own == _LAYER:
            _refuse_formats(file, {layer: _format_of(file, name)})
            found.pop(name)
        elif info.dtype in _FP8 and file.format == "safetensors":
            found[name] = _with_scale(file, name, info, found)
    return {name.removeprefix(prefix): info for name, info in found.items()}


def _with_scale(
    file: SingleFile, name: str, weight: TensorInfo, found: dict[str, TensorInfo]
) -> TensorInfo:
    """Return an 8-bit matrix with its scale; both leave `found`, as does what goes with them."""
    layer, dot, own = name.rpartition(".")
    every = {one: found.get(f"{layer}{dot}{one}") for one in _SCALES if own == _WEIGHT}
    scales = {f"{layer}{dot}{one}": info for one, info in every.items() if info is not None}
    if len(scales) != 1:
        what = "two scales" if scales else "no scale"
        raise _fault(file, f"{name} is stored in 8 bits with {what}, so its numbers are unknown")
    ((scale, info),) = scales.items()
    rows = weight.shape[:1]
    if info.dtype not in FLOATS or info.shape not in ((), (1,), rows, (*rows, 1), (1, 1)):
        what = f"{scale} is {list(info.shape)} in {info.dtype}; a scale is one number, or one a row"
        raise _fault(file, what)
    for one in (scale, *(f"{layer}{dot}{end}" for end in _INPUTS)):
        found.pop(one, None)
    parts = {name: weight, scale: info}
    return TensorInfo(
        weight.shape, "F32", weight.file, bytes=weight.bytes + info.bytes, parts=parts
    )


def _formats_in_header(file: SingleFile) -> Mapping[str, object]:
    """Return the format of each layer by the file's header."""
    try:
        layers = json_of(file.metadata.get(_METADATA, "{}")).get("layers", {})
        return {name: one["format"] for name, one in layers.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _fault(file, f"{_METADATA} in its header cannot be read") from None


def _format_of(file: SingleFile, name: str) -> object:
    info = file.tensors[name]
    with readable(file.path), opened(file.path) as handle:
        handle.seek(info.start)
        data = handle.read(info.bytes)
    try:
        return json_of(data)["format"]
    except (ValueError, TypeError, KeyError):
        raise _fault(file, f"{name} cannot be read") from None


def _refuse_formats(file: SingleFile, formats: Mapping[str, object]) -> None:
    for layer, one in formats.items():
        if one not in _FORMATS:
            raise _fault(file, f"{layer} is packed as {json.dumps(one)}, which is not read")


def _fault(file: SingleFile, what: str) -> CheckpointError:
    return fault("quantized", f"{file.path.name}: {what}", file.path, _HINT)
