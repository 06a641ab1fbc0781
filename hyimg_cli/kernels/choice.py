"""Which kernel a layer's experts run on: chosen once, by device and by how the weights are held.

    device          held     few rows              more rows
    CPU             dense    routed_experts        routed_experts, groups padded
    CPU             fp8      plain_scaled_experts  plain_scaled_experts
    CPU             nf4      plain_experts         plain_experts
    GPU             any      decode_experts        routed_experts, quantised weights made dense
    GPU, 9.x        fp8      decode_experts        scaled_experts

`decode_experts`, in which each row reads its own experts, needs Triton, and a GPU of 8.9 or later
for FP8. On a CPU the number of rows decides nothing, so that a row's bits never depend on its
company.
"""

# Legend: T token, M model width, K chosen expert
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.experts import plain_experts, plain_scaled_experts
from hyimg_cli.kernels.formats import Fp8Rows, Nf4Blocks, Stack
from hyimg_cli.kernels.ops import ops_of
from hyimg_cli.kernels.routed import routed_experts, scaled_experts
from hyimg_cli.kernels.rows import group_multiple
from hyimg_cli.settings.run import Quantization

Capability = tuple[int, int]
# Each row reads its experts anew: near here reading them once for all rows is as fast. Of quantised
# ones that are made dense first, all 64 experts' bytes are moved eight or nine times for a product.
MOST_FEW_ROWS, MOST_FEW_QUANTISED = 10, 64
ANY_ROWS = sys.maxsize


# The compute of a layer's routed experts: a weighted sum [T, M] of each token's chosen experts, of
# rows, weights [T, K] and indices [T, K], added to `onto_TM` where there is one.
Experts = Callable[..., Tensor]


@dataclass(frozen=True)
class ByRows:
    """One kernel for few rows, another for more; the count is the call's shape, known on the
    host.
    """

    few: Experts
    many: Experts
    most_few: int

    def __call__(self, x_TM: Tensor, *choice: Tensor, onto_TM: Tensor | None = None) -> Tensor:
        kernel = self.few if x_TM.shape[0] <= self.most_few else self.many
        return kernel(x_TM, *choice, onto_TM=onto_TM)


def experts_of(gate_and_up: Stack, down: Stack) -> Experts:
    """The compute of a layer's experts.

    Raises MachineError where a package that the format needs is missing.
    """
    if gate_and_up.device.type != "cuda":
        return _on_cpu(gate_and_up, down)
    if isinstance(gate_and_up, Nf4Blocks):
        require_bitsandbytes()
    capability = torch.cuda.get_device_capability(gate_and_up.device)
    form = form_of(gate_and_up)
    stacks: dict[str, Any] = {"gate_and_up": gate_and_up, "down": down}
    by_expert = scaled_experts if form == "fp8" and takes_scaled(capability) else routed_experts
    many = partial(by_expert, around=ops_of(gate_and_up.device), **stacks)
    most_few = most_few_rows(capability, form)
    if not most_few:
        return many
    from hyimg_cli.kernels.decode import decode_experts

    return ByRows(partial(decode_experts, **stacks), many, most_few)


def most_few_rows(capability: Capability, form: Quantization) -> int:
    """Up to how many rows each reads its own experts on such a GPU; 0: none does."""
    if importlib.util.find_spec("triton") is None or (form == "fp8" and not reads_e4m3(capability)):
        return 0
    is_made_dense = form == "nf4" or (form == "fp8" and not takes_scaled(capability))
    return MOST_FEW_QUANTISED if is_made_dense else MOST_FEW_ROWS


def takes_scaled(capability: Capability) -> bool:
    """True if torch multiplies groups of FP8 rows."""
    return capability[0] == 9


def reads_e4m3(capability: Capability) -> bool:
    """Older GPUs have no instructions for e4m3, and Triton no way around it."""
    return capability >= (8, 9)


def form_of(stack: Stack) -> Quantization:
    """How a stack is held."""
    if isinstance(stack, Tensor):
        return "none"
    return "fp8" if isinstance(stack, Fp8Rows) else "nf4"


def rows_unread(capability: Capability, dtype: torch.dtype, form: Quantization) -> int:
    """Up to how many rows of `dtype` no kernel for the experts on such a GPU has a size read on the
    host, Triton provided: a CUDA graph can hold no more. 0: none; `ANY_ROWS`: there is no bound.
    """
    if form == "fp8" and takes_scaled(capability):
        return ANY_ROWS
    if dtype == torch.bfloat16 and capability[0] in (9, 10):
        return ANY_ROWS
    return most_few_rows(capability, form)


def require_bitsandbytes() -> None:
    """Raises MachineError where NF4 is wanted on a GPU and bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineError(
            "nf4 on a GPU needs bitsandbytes, which is not installed",
            hint="pip install 'hyimg-cli[nf4]', or use --quantization fp8",
            code="machine.no-bitsandbytes",
        )


def _on_cpu(gate_and_up: Stack, down: Stack) -> Experts:
    if isinstance(gate_and_up, Tensor) and isinstance(down, Tensor):
        rows = group_multiple(gate_and_up.device)
        return partial(routed_experts, gate_and_up=gate_and_up, down=down, group_rows=rows)
    plain = plain_scaled_experts if isinstance(gate_and_up, Fp8Rows) else plain_experts
    return partial(plain, gate_and_up=gate_and_up, down=down)
