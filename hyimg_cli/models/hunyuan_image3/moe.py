"""The expert layer: a float32 router, the best k of many small MLPs, and one that always runs."""

# Legend: T token, M model width, E expert, K chosen expert
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.models.hunyuan_image3.config import Architecture


class Mlp(nn.Module):
    """`down(up * silu(gate))`. The fused projection holds `up` first, the gate second."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_TM: Tensor) -> Tensor:
        up, gate = self.gate_and_up_proj(x_TM).chunk(2, dim=-1)
        out: Tensor = self.down_proj(up * F.silu(gate))
        return out


class Router(nn.Module):
    """Which experts see a token, and with what weight. Its weights stay in float32."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False, dtype=torch.float32)
        self.top_k = top_k

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E], and the chosen experts' weights and indices [T, K], all from float32.

        Softmax over all experts, then the best k, then renormalised to one.
        """
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = self.wg(x_TM.float())
        best_TK, index_TK = logits_TE.softmax(dim=-1).topk(self.top_k, dim=-1)
        weight_TK = best_TK / best_TK.sum(dim=-1, keepdim=True).clamp_min(1e-8)
        return logits_TE, weight_TK, index_TK


class Moe(nn.Module):
    """Routed experts plus the shared one, token by token: no capacity, nothing is ever dropped."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        width, inner, bias = arch.hidden_size, arch.moe_intermediate_size[layer], arch.mlp_bias
        self.gate = Router(width, arch.num_experts, arch.moe_topk[layer])
        self.experts = nn.ModuleList(Mlp(width, inner, bias=bias) for _ in range(arch.num_experts))
        self.shared_mlp = (
            Mlp(width, inner * arch.num_shared_expert[layer], bias=bias)
            if arch.use_mixed_mlp_moe
            else None
        )

    def forward(self, x_TM: Tensor) -> Tensor:
        _, weight_TK, index_TK = self.gate(x_TM)
        mixed_TM = self._routed(x_TM, weight_TK.to(x_TM.dtype), index_TK)
        return mixed_TM if self.shared_mlp is None else self.shared_mlp(x_TM) + mixed_TM

    def _routed(self, x_TM: Tensor, weight_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Each expert runs once over its tokens; a token's k results add up in order of choice."""
        flat = index_TK.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        rows_by_expert = x_TM[order // index_TK.shape[1]].split(counts)
        results = [
            expert(rows)
            for expert, rows in zip(self.experts, rows_by_expert, strict=True)
            if len(rows)
        ]
        sorted_back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen_TKM = torch.cat(results)[sorted_back].unflatten(0, index_TK.shape)
        mixed_TM: Tensor = (chosen_TKM * weight_TK[..., None]).sum(dim=1)
        return mixed_TM
