"""A checkpoint's transformer as its run wants it, each by the library's own means: quantized, its
blocks taking turns on the device, with another kernel of attention, compiled.

    fp8   stored in 8 bits, each layer widened for its forward (layerwise casting)
    nf4   4 bits by bitsandbytes
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import BitsAndBytesConfig

from hyimg_cli.errors import MachineError, require
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.weights import LoadTarget, load_weights
from hyimg_cli.settings.run import ModelChoice


def load_network(
    component: Component, place: LoadTarget, choice: ModelChoice, prepare: Callable[[Any], None]
) -> Any:
    """A transformer ready for inference; `prepare` is what the family does to one just read.

    Raises CheckpointError, MachineError for a package or a kernel that is not here, or
    torch.OutOfMemoryError.
    """
    options: dict[str, Any] = {}
    if choice.quantization == "nf4":
        require("bitsandbytes", extra="nf4")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=place.dtype
        )
    elif choice.quantization == "fp8":
        # Norms and embeddings stay as they are: the library's own choice.
        options["prepare"] = lambda network: network.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=place.dtype
        )
    network = load_weights(component, place, **options)
    prepare(network)
    try:
        # Always: what an earlier run has set is the library's default from then on.
        network.set_attention_backend(choice.attention_backend)
    except (ImportError, RuntimeError, ValueError) as error:
        raise MachineError(
            f"attention backend {choice.attention_backend} cannot be used here: {error}",
            hint="leave attention_backend out of the recipe, and DIFFUSERS_ATTN_BACKEND unset",
            code="machine.attention",
        ) from None
    if place.offload is not None:
        place.offload.group(network)
    if choice.compile_blocks:
        network.compile_repeated_blocks()
    return network
