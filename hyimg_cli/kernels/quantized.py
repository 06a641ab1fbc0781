"""Quantised matrices as modules: counted, placed and moved with their network."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.formats import Format, Fp8Rows, Nf4Blocks, dense, empty_stack


class QuantizedStack(nn.Module):
    """A quantised stack whose tensors are buffers: counted, placed and moved with the network."""

    def __init__(self, stack: Fp8Rows | Nf4Blocks) -> None:
        super().__init__()
        # The layout alone: its tensors are the buffers, wherever those are moved to.
        self._form = stack.of(_empty(part, torch.device("meta")) for part in stack.tensors)
        for number, tensor in enumerate(stack.tensors):
            self.register_buffer(f"part_{number}", tensor, persistent=False)

    @property
    def stack(self) -> Fp8Rows | Nf4Blocks:
        return self._form.of(self.buffers())

    def on(self, device: torch.device) -> Fp8Rows | Nf4Blocks:
        """An empty stack like this one on `device`."""
        return self._form.of(_empty(part, device) for part in self.buffers())


class QuantizedLinear(nn.Module):
    """A linear layer whose matrix is held in fewer bits, and made dense for each product."""

    def __init__(self, layer: nn.Linear, form: Format, device: torch.device) -> None:
        """Room for the values of a `layer` that has none."""
        super().__init__()
        rows, width = layer.weight.shape
        self.held = QuantizedStack(empty_stack(form, 1, rows, width, device))
        self.bias = layer.bias

    def put(self, weight_OI: Tensor, first: int = 0) -> None:
        """Quantise the matrix, or its rows from `first` on."""
        self.held.stack.put(0, weight_OI, first=first)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dense(self.held.stack, x.dtype)[0], self.bias)


def hold(network: nn.Module, form: Format, device: torch.device) -> None:
    """Put quantised ones in the place of all linear layers, to be filled."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, QuantizedLinear(layer, form, device))


def _empty(like: Tensor, device: torch.device) -> Tensor:
    # By `empty_like` the meta device would have torch import its compiler.
    return torch.empty(like.shape, dtype=like.dtype, device=device)
