"""Wan's transformers over ranks, by the library's own plan (Ulysses): each rank holds a part of the
tokens, and in attention all of them, of a part of the heads.

    rank r   tokens r of N ▸ blocks [ ▸ all-to-all ▸ heads r of N ▸ all-to-all ▸ ] ▸ gathered: all

Text is not split. Products of fewer rows round differently: equal within that.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.hooks.context_parallel import remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyimg_cli.parallel.wire import loopback

_MESH = ("ring", "ulysses")


class SplitTokens:
    """The transformers of one checkpoint on this rank, whole or with their part of the tokens."""

    def __init__(self, networks: Sequence[Any], device: torch.device, *, by_token: bool) -> None:
        """`by_token`: each token has a timestep of its own (the 5B model of 2.2)."""
        self._networks, self._device = networks, device
        self._left_out = () if by_token else ("",)
        self._mesh: DeviceMesh | None = None
        self._is_split = False

    def split(self, ranks: int) -> None:
        """From here on a forward is one of all ranks, which call this together, and hold layers
        of the same names.
        """
        if self._mesh is None:
            with loopback():
                self._mesh = init_device_mesh(self._device.type, (1, ranks), mesh_dim_names=_MESH)
        # The library's own call in its own hook is what warns.
        warnings.filterwarnings("ignore", ".*all_gather_tensor", FutureWarning, "diffusers.hooks")
        for network in self._networks:
            own = ContextParallelConfig(ulysses_degree=ranks, mesh=self._mesh)
            config = ParallelConfig(context_parallel_config=own)
            config.setup(self._mesh.get_rank(), ranks, self._device, mesh=self._mesh)
            # The library's way to a mesh asks for an accelerator, and divides by their number.
            network._resolve_parallel_config = lambda _, resolved=config: resolved
            network.enable_parallelism(config=config, cp_plan=self._plan(network))
        self._is_split = True

    def whole(self) -> None:
        """Undo `split`. A LoRA may put another layer in the place of one that gathers tokens."""
        if self._is_split:
            for network in self._networks:
                remove_context_parallel(network, self._plan(network))
        self._is_split = False

    def forget(self) -> None:
        """The ranks are gone: others form another group."""
        self._mesh = None

    def _plan(self, network: Any) -> dict[str, Any]:
        """The library's, without an input that this checkpoint does not have: it warns of that."""
        return {name: part for name, part in network._cp_plan.items() if name not in self._left_out}
