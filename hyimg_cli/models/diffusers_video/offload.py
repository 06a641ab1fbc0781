"""CPU offload: all of a checkpoint's networks on the device, or the one that is at work.

    main memory   text encoders, transformers, VAE: every weight, for as long as it is loaded
    device        a copy of the weights of one network; the next one's takes its place

In groups a transformer's blocks come one at a time, by the library's group offload, and the rest of
it as a network of its own. Weights are only read: copies have the same bits, so have the pixels.
"""

from itertools import chain

import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from torch import Tensor, nn


class Offload:
    """Brings one network at a time to the device, at the borders of stages."""

    def __init__(self, device: torch.device, *, in_groups: bool = False) -> None:
        self._device, self._in_groups = device, in_groups
        self._network: nn.Module | None = None
        # Its tensors, and what they held in main memory.
        self._at_home: list[tuple[Tensor, Tensor]] = []

    def group(self, network: nn.Module) -> None:
        """Have a transformer's blocks come by themselves from now on, if that was asked for."""
        if not self._in_groups:
            return
        for block in _blocks(network):
            # One by one: the library takes lists of blocks, and moves what is beside them when the
            # module is called as a whole, which not every forward of ours does.
            alone = nn.Module()
            alone.blocks = nn.ModuleList([block])
            apply_group_offloading(
                alone, self._device, offload_type="block_level", num_blocks_per_group=1
            )

    def bring(self, network: nn.Module) -> None:
        """Have a network on the device; called before each of its forwards. Raises
        torch.OutOfMemoryError where it does not fit, and leaves it in main memory then.
        """
        if network is self._network:
            return
        self.release()
        self._network = network
        try:
            for tensor in self._brought(network):
                away = tensor.data.to(self._device, copy=True)
                self._at_home.append((tensor, tensor.data))
                tensor.data = away
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free what is on the device: it can be brought again."""
        for tensor, at_home in self._at_home:
            tensor.data = at_home
        self._at_home.clear()
        self._network = None

    def _brought(self, network: nn.Module) -> list[Tensor]:
        """Tensors that come with the network: all but those of blocks that come by themselves."""
        blocks = _blocks(network) if self._in_groups else []
        alone = {id(tensor) for block in blocks for tensor in _tensors(block)}
        return [tensor for tensor in _tensors(network) if id(tensor) not in alone]


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer; other networks have none."""
    found = getattr(network, "transformer_blocks", getattr(network, "blocks", None))
    return list(found) if isinstance(found, nn.ModuleList) else []


def _tensors(network: nn.Module) -> chain[Tensor]:
    return chain(network.parameters(), network.buffers())
