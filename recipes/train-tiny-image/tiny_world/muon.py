"""Momentum whose updates are orthogonalised, for matrices and convolution kernels.

Source: Muon, K. Jordan et al. 2024. Vectors and embeddings are AdamW's.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Source: the quintic Newton-Schulz coefficients of the Muon reference implementation.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Muon for parameters of two or more dimensions.

    A kernel counts as a matrix of outputs by all other dimensions. A cubic kernel is updated only
    in its middle temporal tap, the only one that a single frame uses.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[self._matrix(parameter).shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, float]) -> None:
        """Update parameters of one shape together: many small products take longer than a batch."""
        ahead = [self._ahead(parameter, group["momentum"]) for parameter in parameters]
        flat = torch.stack(ahead).flatten(2)
        updates = _orthogonal(flat).view_as(torch.stack(ahead))
        scale = max(1.0, flat.shape[1] / flat.shape[2]) ** 0.5
        for parameter, update in zip(parameters, updates, strict=True):
            weight = self._matrix(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)

    def _ahead(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient, state = self._matrix(parameter.grad), self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)

    def _matrix(self, tensor: Tensor | None) -> Tensor:
        """Return the part of a parameter that a single frame uses."""
        assert tensor is not None, "only parameters with a gradient are updated"
        if tensor.ndim != 5:
            return tensor
        middle: Tensor = tensor.select(2, tensor.shape[2] // 2)
        return middle


class KernelMuon(Muon):
    """Muon for films: updates all taps of a cubic kernel."""

    def _matrix(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None, "only parameters with a gradient are updated"
        return tensor


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return about the nearest matrices [.., rows, columns] with singular values near 1."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).to(torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    nearest: Tensor = x.mT if is_tall else x
    return nearest
