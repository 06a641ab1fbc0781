"""The two optimisers of a run: Muon for matrices and kernels, AdamW for the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiny_world.muon import Muon
from tiny_world.workers import average_gradients

IsMatrix = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Rates:
    """Peak learning rates; both follow the same schedule."""

    muon: float
    adam: float
    weight_decay: float = 0.0


class Optimizers:
    """Steps a module's parameters together, averaged over the workers and clipped."""

    def __init__(
        self, module: nn.Module, rates: Rates, is_matrix: IsMatrix, muon: type[Muon] = Muon
    ) -> None:
        self.module, self.rates = module, rates
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if is_matrix(n, p)]
        others = [p for n, p in named if not is_matrix(n, p)]
        self.muon = muon(matrices, rates.muon, momentum=0.95, weight_decay=rates.weight_decay)
        self.adam = torch.optim.AdamW(
            others, rates.adam, betas=(0.9, 0.98), weight_decay=rates.weight_decay
        )

    def step(self, factor: float) -> float:
        """Apply the gradients at `factor` of the peak rates; return their norm before clipping."""
        self.muon.param_groups[0]["lr"] = self.rates.muon * factor
        self.adam.param_groups[0]["lr"] = self.rates.adam * factor
        average_gradients(self.module)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.module.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
