"""CPU offload: all of a checkpoint's networks on the device, or the one that is at work.

    main memory   text encoders, transformers, VAE: every weight, for as long as it is loaded
    device        a copy of the weights of one network; the next one's takes its place

Weights are only read, so nothing is copied back: a network that leaves has its own tensors again.
Copies have the same bits, and so have the pixels.
"""

import torch
from torch import Tensor, nn


class Offload:
    """Brings one network at a time to the device, at the borders of stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._network: nn.Module | None = None
        # Its tensors, and what they held in main memory.
        self._at_home: list[tuple[Tensor, Tensor]] = []

    def bring(self, network: nn.Module) -> None:
        """Have a network on the device; called before each of its forwards. Raises
        torch.OutOfMemoryError where it does not fit, and leaves it in main memory then.
        """
        if network is self._network:
            return
        self.release()
        self._network = network
        try:
            for tensor in (*network.parameters(), *network.buffers()):
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
