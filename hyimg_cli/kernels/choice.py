"""Which kernel a layer's experts run on: chosen once, by device and by how the weights are held.

    device          held     few rows              more rows
    CPU             dense    routed_experts        routed_experts, groups padded
    CPU             fp8      plain_scaled_experts  plain_scaled_experts
    CPU             nf4      plain_experts         plain_experts
    GPU             any      one row of the table: `expert_table`

On a CPU the number of rows decides nothing, so that a row's bits never depend on its company.
"""

# Legend: T token, M model width, K chosen expert
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.expert_table import Capability, ExpertRow, reads_e4m3, row_for, takes_scaled
from hyimg_cli.kernels.experts import plain_experts, plain_scaled_experts
from hyimg_cli.kernels.formats import Fp8Rows, Nf4Blocks, Stack
from hyimg_cli.kernels.routed import quack_experts, routed_experts, scaled_experts
from hyimg_cli.kernels.rows import group_multiple
from hyimg_cli.kernels.rowwise import rowwise
from hyimg_cli.settings.run import Quantization

# Each row reads its experts anew: near here reading them once for all rows is as fast.
MOST_FEW_ROWS = ExpertRow.most_few
ANY_ROWS = sys.maxsize


class Experts(Protocol):
    """The compute of a layer's routed experts."""

    def __call__(
        self,
        x_TM: Tensor,
        weight_TK: Tensor,
        index_TK: Tensor,
        *,
        onto_TM: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum [T, M] of each token's chosen experts, added to `onto` where there is
        one.
        """


@dataclass(frozen=True)
class ByRows:
    """One kernel for few rows, another for more; the count is the call's shape, known on the
    host.
    """

    few: Experts
    many: Experts
    most_few: int = MOST_FEW_ROWS

    def __call__(
        self,
        x_TM: Tensor,
        weight_TK: Tensor,
        index_TK: Tensor,
        *,
        onto_TM: Tensor | None = None,
    ) -> Tensor:
        kernel = self.few if x_TM.shape[0] <= self.most_few else self.many
        return kernel(x_TM, weight_TK, index_TK, onto_TM=onto_TM)


def experts_of(gate_and_up: Stack, down: Stack) -> Experts:
    """The compute of a layer's experts.

    Raises MachineError where a package that the format needs is missing.
    """
    if gate_and_up.device.type != "cuda":
        return _on_cpu(gate_and_up, down)
    if isinstance(gate_and_up, Nf4Blocks):
        require_bitsandbytes()
    row = row_on(gate_and_up.device, form_of(gate_and_up))
    few, many = (kernel(name, gate_and_up, down) for name in (row.few, row.many))
    return many if row.few == row.many else ByRows(few, many, row.most_few)


def row_on(device: torch.device, form: Quantization) -> ExpertRow:
    """The table's row for a GPU's card."""
    capability = torch.cuda.get_device_capability(device)
    return row_for(torch.cuda.get_device_name(device), capability, form)


def form_of(stack: Stack) -> Quantization:
    """How a stack is held."""
    if isinstance(stack, Tensor):
        return "none"
    return "fp8" if isinstance(stack, Fp8Rows) else "nf4"


def kernel(name: str, gate_and_up: Stack, down: Stack) -> Experts:
    """A kernel of the table on a layer's weights."""
    stacks: dict[str, Any] = {"gate_and_up": gate_and_up, "down": down}
    if name == "decode":
        from hyimg_cli.kernels.decode import decode_experts

        return partial(decode_experts, **stacks)
    by_name: dict[str, Callable[..., Tensor]] = {
        "grouped": routed_experts,
        "scaled": scaled_experts,
        "scaled_1": partial(scaled_experts, group_rows=1),
        "quack": quack_experts,
    }
    return partial(by_name[name], around=rowwise(gate_and_up.device), **stacks)


def rows_unread(
    capability: Capability,
    dtype: torch.dtype,
    form: Quantization,
    most_few: int = MOST_FEW_ROWS,
) -> int:
    """Up to how many rows of `dtype` no kernel for the experts on such a GPU has a size read on the
    host, Triton provided: a CUDA graph can hold no more. 0: none; `ANY_ROWS`: there is no bound.
    `most_few`: the table's, up to which the kernel for few rows is taken.
    """
    if form == "fp8" and takes_scaled(capability):
        return ANY_ROWS
    if dtype == torch.bfloat16 and capability[0] in (9, 10):
        return ANY_ROWS
    return 0 if form == "fp8" and not reads_e4m3(capability) else most_few


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
