"""Linear layers with quantised matrices."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.kernels.formats import Format, dense, empty_stack


class QuantizedLinear(nn.Module):
    """A linear layer whose matrix is held in fewer bits, and made dense for each product."""

    def __init__(self, layer: nn.Linear, form: Format, device: torch.device) -> None:
        """Room for the values of a `layer` that has none."""
        super().__init__()
        rows, width = layer.weight.shape
        self.held = empty_stack(form, 1, rows, width, device)
        self.bias = layer.bias

    def put(self, weight_OI: Tensor, first: int = 0) -> None:
        """Quantise the matrix, or its rows from `first` on."""
        self.held.put(0, weight_OI, first=first)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dense(self.held, x.dtype)[0], self.bias)


def hold(network: nn.Module, form: Format, device: torch.device) -> None:
    """Put quantised ones in the place of all linear layers, to be filled."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, QuantizedLinear(layer, form, device))
