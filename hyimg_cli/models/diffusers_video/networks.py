"""A checkpoint's transformers as the run's settings need them, by diffusers' own means.

    fp8   stored in 8 bits, each layer widened for its forward (layerwise casting)
    nf4   4 bits by bitsandbytes

Also blocks in turns on the device, another attention kernel, compiling, and for Wan the split of
tokens over ranks (Ulysses): each rank holds a part of the tokens, and in attention all tokens of a
part of the heads. Text is not split. Products of fewer rows round differently.

    rank r   tokens r of N ▸ blocks [ ▸ all-to-all ▸ heads r of N ▸ all-to-all ▸ ] ▸ gathered: all
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import BitsAndBytesConfig
from diffusers.hooks.context_parallel import remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyimg_cli.errors import MachineError, require
from hyimg_cli.models.diffusers_video.layout import Component
from hyimg_cli.models.diffusers_video.weights import LoadTarget, load_weights
from hyimg_cli.parallel.wire import loopback
from hyimg_cli.settings.run import ModelChoice

_MESH = ("ring", "ulysses")


def load_network(
    component: Component,
    place: LoadTarget,
    choice: ModelChoice,
    prepare: Callable[[Any], object] = id,
) -> Any:
    """Return a transformer ready for inference; `prepare` adapts it after reading.

    Raises CheckpointError, MachineError for a missing package or kernel, or torch.OutOfMemoryError.
    """
    options: dict[str, Any] = {}
    if choice.quantization == "nf4":
        require("bitsandbytes", extra="nf4")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=place.dtype
        )
    elif choice.quantization == "fp8":
        # Norms and embeddings stay unchanged, as the library does.
        options["prepare"] = lambda network: network.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=place.dtype
        )
    network = load_weights(component, place, **options)
    prepare(network)
    try:
        # Set every time: an earlier run's choice has become the library's default.
        network.set_attention_backend(choice.attention_backend)
    except (ImportError, RuntimeError, ValueError) as error:
        raise MachineError(
            f"attention backend {choice.attention_backend} cannot be used here: {error}",
            hint="remove attention_backend from the recipe, and unset DIFFUSERS_ATTN_BACKEND",
            code="machine.attention",
        ) from None
    if choice.compile_blocks:
        compile_blocks(network)
    return network


def compile_blocks(network: Any, **how: Any) -> None:
    """Compile the repeated blocks; after two lengths, a graph is for every length.

    `how`: options of torch.compile.
    """
    from torch._dynamo import config  # takes a second

    # Numbers of rows that an attention processor keeps are as variable as tensors' sizes.
    config.allow_unspec_int_on_nn_module = True
    # Blocks of one class, wherever in a network, share a limit; behind it they run uncompiled.
    config.recompile_limit = max(config.recompile_limit, 16)
    network.compile_repeated_blocks(**how)


class SplitTokens:
    """The transformers of one checkpoint on this rank, whole or with its part of the tokens."""

    def __init__(self, networks: Sequence[Any], device: torch.device, *, by_token: bool) -> None:
        """Keep the transformers whole.

        `by_token`: each token has its own timestep (2.2's 5B model).
        """
        self._networks, self._device = networks, device
        self._left_out = () if by_token else ("",)
        self._mesh: DeviceMesh | None = None
        self._is_split = False

    def split(self, ranks: int) -> None:
        """Split forwards over all ranks, which call this together and have equal layers."""
        if self._mesh is None:
            with loopback():
                self._mesh = init_device_mesh(self._device.type, (1, ranks), mesh_dim_names=_MESH)
        # A call of the library's own hook causes the warning.
        warnings.filterwarnings("ignore", ".*all_gather_tensor", FutureWarning, "diffusers.hooks")
        for network in self._networks:
            own = ContextParallelConfig(ulysses_degree=ranks, mesh=self._mesh)
            config = ParallelConfig(context_parallel_config=own)
            config.setup(self._mesh.get_rank(), ranks, self._device, mesh=self._mesh)
            # The library's way to make a mesh needs an accelerator, and divides by their number.
            network._resolve_parallel_config = lambda _, resolved=config: resolved
            network.enable_parallelism(config=config, cp_plan=self._plan(network))
        self._is_split = True

    def whole(self) -> None:
        """Undo `split`. A LoRA may replace a layer that gathers tokens."""
        if self._is_split:
            for network in self._networks:
                remove_context_parallel(network, self._plan(network))
        self._is_split = False

    def forget(self) -> None:
        """Forget the ranks after they have ended; new ones form another group."""
        self._mesh = None

    def _plan(self, network: Any) -> dict[str, Any]:
        """Return the library's plan without inputs that this checkpoint lacks."""
        return {name: part for name, part in network._cp_plan.items() if name not in self._left_out}
