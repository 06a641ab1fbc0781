"""Keep networks in main memory, and bring those that work to the device."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.transfer import tensors_of

if TYPE_CHECKING:
    from hyimg_cli.kernels.streamed_blocks import StreamedBlocks


class Offload:
    """Networks that take turns on a device: one at a time, or those that work together.

        main memory   all weights of the networks that are kept here
        device        a copy of the weights of the one at work

    A network's blocks may come one at a time, each while the one before it works; the rest of it
    comes as a whole. Weights are only read, so pixels are the same, and nothing goes back to main
    memory. A network that was never kept stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._turn = device, Lock()
        # The kept networks, with the blocks that come one at a time.
        self._kept: weakref.WeakKeyDictionary[nn.Module, StreamedBlocks | None] = (
            weakref.WeakKeyDictionary()
        )
        self._onloaded: tuple[nn.Module, ...] = ()
        # Their tensors, and the tensors' data in main memory.
        self._at_home: list[tuple[Tensor, Tensor]] = []

    def keep(self, network: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        """Keep a network in main memory from now on; `blocks` come one at a time."""
        if network in self._kept:
            return
        for tensor in tensors_of(network):  # bitsandbytes packs weights on the GPU
            tensor.data = tensor.data.cpu()
        self._kept[network] = None
        if blocks:
            from hyimg_cli.kernels.streamed_blocks import StreamedBlocks  # and torch's compiler

            self._kept[network] = StreamedBlocks(blocks, self.device)

    def onload(self, *networks: nn.Module) -> None:
        """Bring those of the networks that are kept to the device; called before each forward.

        Raises torch.OutOfMemoryError if they do not fit; they then stay in main memory.
        """
        wanted = tuple(network for network in networks if network in self._kept)
        if not wanted or wanted == self._onloaded:
            return
        self.unload()
        self._onloaded = wanted
        try:
            for network in wanted:
                streamed = self._kept[network]
                of_blocks = {
                    id(tensor)
                    for block in (streamed.blocks if streamed else ())
                    for tensor in tensors_of(block)
                }
                for tensor in (one for one in tensors_of(network) if id(one) not in of_blocks):
                    away = tensor.data.to(self.device, copy=True)
                    self._at_home.append((tensor, tensor.data))
                    tensor.data = away
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Free the device's memory; a network's next forward brings it again."""
        for tensor, at_home in self._at_home:
            tensor.data = at_home
        self._at_home.clear()
        self._onloaded = ()
        for streamed in self._kept.values():
            if streamed is not None:
                streamed.unload()

    @contextmanager
    def turn(self, network: nn.Module) -> Iterator[None]:
        """Keep a network, and hold it on the device inside; another thread waits for its turn."""
        with self._turn:
            try:
                self.keep(network)
                self.onload(network)
                yield
            finally:
                self.unload()
