"""The expert layer: a float32 router, the best k of many small MLPs, and a shared one."""

# Legend: T token, M model width, E expert, K chosen expert
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.experts import Experts, RoutedTokens, plain_experts
from hyimg_cli.kernels.formats import Format, Fp8Rows, Nf4Blocks, Stacks, empty_stack
from hyimg_cli.models.common.layers import FusedPart
from hyimg_cli.models.hunyuan_image3.config import Architecture


class Mlp(FusedPart):
    """`down(up * silu(gate))`. The fused projection holds `up` first, the gate second."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.down_proj(self.ops.swiglu(*self.gate_and_up_proj(x_TM).chunk(2, dim=-1)))


class Router(FusedPart):
    """The experts that see a token, and their weights. Its own weights stay in float32."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False, dtype=torch.float32)
        self.top_k = top_k

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], and the chosen experts' weights (as `x`) and indices [T, K].

        In float32: softmax over all experts, then the best k, then renormalised to one.
        """
        return self.ops.routed(x_TM, self.wg.weight, self.top_k)


class Moe(nn.Module):
    """Routed experts plus the shared one, token by token: no capacity, nothing is ever dropped.

    `stacks`: all experts' `gate_and_up_proj` and `down_proj`, side by side, once they have room.
    """

    stacks: Stacks

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, inner = arch.hidden_size, arch.moe_intermediate_size
        self.gate = Router(width, arch.num_experts, arch.moe_topk)
        self.experts = nn.ModuleList(Mlp(width, inner) for _ in range(arch.num_experts))
        self.shared_mlp = Mlp(width, inner)
        # Chosen with the kernels of the layer's device, once the weights are in place.
        self.compute: Experts | None = None

    def forward(self, x_TM: Tensor) -> Tensor:
        flat_TM = x_TM.reshape(-1, x_TM.shape[-1])
        _, weight_TK, index_TK = self.gate(flat_TM)
        compute = self.compute
        if compute is None:
            # No kernels were chosen, as in a network in training.
            gate_and_up, down = (torch.stack([m.weight for m in ms]) for ms in self._matrices())
            compute = partial(plain_experts, stacks=(gate_and_up, down))
        tokens = RoutedTokens(flat_TM, weight_TK, index_TK, self.shared_mlp(flat_TM))
        return compute(tokens).view_as(x_TM)

    @property
    def is_quantised(self) -> bool:
        """True if quantized stacks have replaced the experts' matrices."""
        return isinstance(self.experts[0], Fp8Rows | Nf4Blocks)

    def hold(self, form: Format) -> None:
        """Replace the experts' own matrices with stacks of `form`, on their device."""
        weights = [layers[0].weight for layers in self._matrices()]
        count = len(self.experts)
        self._keep(empty_stack(form, count, w.shape[0], w.shape[1], w.device) for w in weights)

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the experts' matrices on `device`; values come later, quantized by `put`."""
        if self.is_quantised:
            self._keep(held.on(device) for held in self.stacks if not isinstance(held, Tensor))
            return
        banks = []
        for layers in self._matrices():
            shape = len(layers), *layers[0].weight.shape
            banks.append(torch.empty(shape, dtype=dtype, device=device))
            for number, layer in enumerate(layers):
                layer.weight = nn.Parameter(banks[-1][number], requires_grad=False)
        self.stacks = banks[0], banks[1]

    def _keep(self, stacks: Iterable[Fp8Rows | Nf4Blocks]) -> None:
        """Keep stacks instead of the experts."""
        gate_and_up, down = stacks
        self.stacks = gate_and_up, down
        self.experts = nn.ModuleList(self.stacks)

    def _matrices(self) -> tuple[list[nn.Linear], list[nn.Linear]]:
        experts = [expert for expert in self.experts if isinstance(expert, Mlp)]
        return [e.gate_and_up_proj for e in experts], [e.down_proj for e in experts]

    def quantised(self, matrix: str) -> Fp8Rows | Nf4Blocks:
        """Return the quantized stack of the experts' `gate_and_up_proj` or `down_proj`."""
        stack = self.stacks[matrix == "down_proj"]
        assert not isinstance(stack, Tensor), "they are held in fewer bits"
        return stack
