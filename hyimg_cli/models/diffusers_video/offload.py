"""CPU offload: all of a checkpoint's networks on the device, or the one that is at work.

    main memory   text encoders, transformers, VAE: every weight, for as long as it is loaded
    device        a copy of the weights of one network; the next one's takes its place

Weights are only read, so nothing is copied back: a network that leaves has its own tensors again.
Copies have the same bits, and so have the pixels.
"""

from typing import Protocol

import torch
from torch import Tensor, nn


class Offload(Protocol):
    """Brings networks to the device at the borders of stages."""

    def placed(self, network: nn.Module, device: torch.device) -> nn.Module:
        """A network that was just read, where it stays while others work."""

    def bring(self, network: nn.Module) -> None:
        """Have a network on the device; called before each of its forwards. Raises
        torch.OutOfMemoryError where it does not fit, and leaves it in main memory then.
        """

    def release(self) -> None:
        """Free what on the device can be brought again."""


class NoOffload:
    """Every network goes to the device when it is read, and stays."""

    def placed(self, network: nn.Module, device: torch.device) -> nn.Module:
        return network.to(device)

    def bring(self, network: nn.Module) -> None:
        """It is there."""

    def release(self) -> None:
        """All are to stay."""


class OneAtATime:
    """One network at a time is on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._network: nn.Module | None = None
        # Its tensors, and what they held in main memory.
        self._at_home: list[tuple[Tensor, Tensor]] = []

    def placed(self, network: nn.Module, device: torch.device) -> nn.Module:
        return network

    def bring(self, network: nn.Module) -> None:
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
        for tensor, at_home in self._at_home:
            tensor.data = at_home
        self._at_home.clear()
        self._network = None
