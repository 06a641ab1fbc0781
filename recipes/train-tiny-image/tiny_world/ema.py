"""A running average of a module's weights."""

import torch
from torch import Tensor, nn


class Ema:
    """A smoothed copy of every parameter.

    Its memory is shorter at first, so that early weights fade.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        shadows = list(self.shadow.values())
        torch._foreach_lerp_(shadows, [p.detach() for p in module.parameters()], 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Overwrite the module's parameters with the smoothed ones."""
        for name, parameter in module.named_parameters():
            parameter.copy_(self.shadow[name])

    def state_dict(self) -> dict[str, Tensor | int]:
        return {"updates": self.updates, **self.shadow}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        self.updates = int(state["updates"])
        for name, shadow in self.shadow.items():
            shadow.copy_(torch.as_tensor(state[name]))
