"""Build a network from a single file, safetensors or GGUF, as the library builds it from a folder.

    a file ▸ tensors, mapped ▸ names of the class (`spellings`) ▸ the network

Matrices that a GGUF file packs stay packed, in the library's layers that unpack them in each
forward. Everything else is unpacked here: the library leaves a packed norm or bias as bytes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from diffusers.models.model_loading_utils import load_model_dict_into_meta
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from torch import Tensor, nn

from hyimg_cli.errors import require
from hyimg_cli.loading.checkpoint import FLOATS, TensorInfo, open_tensors, readable
from hyimg_cli.loading.readers import DTYPES
from hyimg_cli.loading.single_file import SingleFile
from hyimg_cli.models.architectures import architecture_of
from hyimg_cli.models.common.weights import owner_of
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.spellings import spelled


def network_of_file(
    component: Component, cls: Any, dtype: torch.dtype, quantization_config: Any = None
) -> tuple[Any, dict[str, list[str]]]:
    """Return the network of a component whose weights are a single file, in main memory.

    With the names that the file lacks, and those that the network lacks, as the library reports
    them: none after `check_weights`. `quantization_config`: the library's, which packs as it loads.
    Raises CheckpointError, or MachineError if gguf is not installed.
    """
    file = component.weights
    assert file is not None, "only for a component with a single file"
    stored = component.tensors()
    if is_packed(stored):
        require("gguf", extra="gguf")
        from diffusers import GGUFQuantizationConfig

        quantization_config = GGUFQuantizationConfig(compute_dtype=dtype)
    quantizer: Any = None
    devices: Any = {"": torch.device("cpu")}
    if quantization_config is not None:
        is_stored = is_packed(stored)
        quantizer = DiffusersAutoQuantizer.from_config(quantization_config, pre_quantized=is_stored)
        quantizer.validate_environment(torch_dtype=dtype, device_map=None)
        devices = quantizer.update_device_map(None) or devices
    with _default_dtype(dtype), accelerate.init_empty_weights():
        network = cls.from_config(component.config().values)
    with torch.no_grad(), readable(file.path):
        read, expected = _read(file, stored, dtype), network.state_dict().keys()
        named = spelled(read, expected, component.class_name, file.path).tensors
        tensors: Any = {name: _usable(network, name, one) for name, one in named.items()}
    kept = list(cls._keep_in_fp32_modules or ())
    if quantizer is not None:
        kept = kept if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
        quantizer.preprocess_model(
            network, device_map=devices, state_dict=tensors, keep_in_fp32_modules=kept
        )
    load_model_dict_into_meta(
        network, tensors, dtype, str(file.path), quantizer, kept, devices, unexpected_keys=[]
    )
    if quantizer is not None:
        quantizer.postprocess_model(network)
        network.hf_quantizer = quantizer
    missing, unexpected = expected - tensors.keys(), tensors.keys() - expected
    return network, {"missing_keys": [*missing], "unexpected_keys": [*unexpected]}


def is_packed(stored: Mapping[str, TensorInfo]) -> bool:
    """Return True if the tensors have types of GGUF, which its package unpacks."""
    return any(info.dtype not in FLOATS for info in stored.values())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of `dtype`, as the library does while it builds a network."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _read(
    file: SingleFile, stored: Mapping[str, TensorInfo], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a file's tensors: views of the mapped file, packed ones by the library's class."""
    if file.format == "gguf":
        size = file.path.stat().st_size
        every = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
        return {name: _from_gguf(every, info, dtype) for name, info in stored.items()}
    prefix = architecture_of(file).prefix
    with open_tensors(file.path) as opened:

        def tensor(name: str, info: TensorInfo) -> Tensor:
            if not info.parts:
                return opened.get_tensor(prefix + name)
            weight, scale = (opened.get_tensor(part) for part in info.parts)
            scales = scale.float().view(-1, *[1] * (weight.ndim - 1))
            return (weight.float() * scales).to(dtype)

        return {name: tensor(name, info) for name, info in stored.items()}


def _from_gguf(every: Tensor, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    data = every[info.start : info.start + info.bytes]
    if info.dtype in FLOATS:
        return data.view(DTYPES[info.dtype]).view(info.shape)
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[info.dtype]
    numbers, _ = GGML_QUANT_SIZES[kind]
    if info.shape and info.shape[-1] % numbers == 0:
        return GGUFParameter(data.view(*info.shape[:-1], -1), quant_type=kind)
    # Stored in another shape, whose rows are blocks.
    packed = GGUFParameter(data.view(1, -1), quant_type=kind)
    return dequantize_gguf_tensor(packed).view(info.shape).to(dtype)


def _usable(network: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as its layer reads it: packed only if it is the matrix of a linear layer."""
    if not hasattr(tensor, "quant_type"):
        return tensor
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    module, own = owner_of(network, name)
    if own == "weight" and isinstance(module, nn.Linear):
        return tensor
    unpacked: Tensor = dequantize_gguf_tensor(tensor)
    return unpacked
