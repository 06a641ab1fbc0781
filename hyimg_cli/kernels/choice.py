"""Choose the kernels of a layer by its device, and of routed experts by the format of the weights.

    device          held     few rows              more rows
    CPU             dense    routed_experts        routed_experts, groups padded
    CPU             fp8      plain_scaled_experts  plain_scaled_experts
    CPU             nf4      plain_experts         plain_experts
    GPU             any      decode_experts        routed_experts, quantised weights unpacked
    GPU, 9.x        fp8      decode_experts        scaled_experts

`decode_experts`, in which each row reads its own experts, needs Triton, and a GPU of 8.9 or later
for FP8. On a CPU the number of rows decides nothing, so a row's bits never depend on the other
rows.
"""

import importlib.util
import logging
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError, installation
from hyimg_cli.kernels.decode_attention import DecodeAttention, plain_decode
from hyimg_cli.kernels.experts import (
    Experts,
    RoutedTokens,
    plain_experts,
    plain_scaled_experts,
    routed_experts,
    scaled_experts,
)
from hyimg_cli.kernels.formats import Fp8Rows, Stacks
from hyimg_cli.kernels.ops import PLAIN, PlainOps
from hyimg_cli.kernels.rows import group_multiple
from hyimg_cli.settings.run import Quantization
from hyimg_cli.spec.compilers import triton_lacks

_LOG = logging.getLogger(__name__)
Capability = tuple[int, int]
# Each row reads its experts anew; from about this count, reading them once for all rows is as fast.
# Quantized experts are unpacked first, which moves all 64 experts' bytes eight or nine times per
# product.
MOST_FEW_ROWS, MOST_FEW_QUANTISED = 10, 64
ANY_ROWS = sys.maxsize


def has_triton() -> bool:
    """Return True if Triton is installed and can build its kernels here."""
    return not triton_lacks()


def ops_of(device: torch.device) -> PlainOps:
    """Return the kernels for a layer on `device`; called once, when the model is built."""
    if device.type != "cuda":
        return PLAIN
    if not has_triton():
        _LOG.warning("%s: norms, router and experts run unfused, and slower", triton_lacks())
        return PLAIN
    from hyimg_cli.kernels.fused_ops import FusedOps

    return FusedOps()


def decode_attention(device: torch.device) -> DecodeAttention:
    """Return the kernels on a GPU, their twin on a CPU; called once, when the model is built.

    Triton must be installed for a GPU.
    """
    if device.type != "cuda":
        return plain_decode
    from hyimg_cli.kernels.paged_decode import paged_decode

    return paged_decode


@dataclass(frozen=True)
class ByRows:
    """One kernel for few rows and another for more, chosen by the shape of the call."""

    few: Experts
    many: Experts
    most_few: int

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        return (self.few if len(tokens.x_TM) <= self.most_few else self.many)(tokens)


def experts_of(stacks: Stacks) -> Experts:
    """Return the kernels of a layer's experts.

    Raises MachineError if a package that the format needs is missing.
    """
    held, device = stacks[0], stacks[0].device
    form: Quantization = "none"
    if not isinstance(held, Tensor):
        form = "fp8" if isinstance(held, Fp8Rows) else "nf4"
    if device.type != "cuda":
        if form == "none":
            return partial(routed_experts, stacks=stacks, group_rows=group_multiple(device))
        return partial(plain_scaled_experts if form == "fp8" else plain_experts, stacks=stacks)
    if form == "nf4":
        require_bitsandbytes()
    capability = torch.cuda.get_device_capability(device)
    by_expert = scaled_experts if form == "fp8" and takes_scaled(capability) else routed_experts
    many = partial(by_expert, stacks=stacks, ops=ops_of(device))
    most_few = most_few_rows(capability, form)
    if not most_few:
        return many
    from hyimg_cli.kernels.decode import decode_experts  # needs Triton

    return ByRows(partial(decode_experts, stacks=stacks), many, most_few)


def most_few_rows(capability: Capability, form: Quantization) -> int:
    """Return the row count up to which each row reads its own experts on such a GPU; may be 0."""
    # Older GPUs have no instructions for e4m3, and Triton cannot emulate them.
    if not has_triton() or (form == "fp8" and capability < (8, 9)):
        return 0
    is_made_dense = form == "nf4" or (form == "fp8" and not takes_scaled(capability))
    return MOST_FEW_QUANTISED if is_made_dense else MOST_FEW_ROWS


def takes_scaled(capability: Capability) -> bool:
    """Return True if torch multiplies groups of FP8 rows."""
    return capability[0] == 9


def rows_unread(capability: Capability, dtype: torch.dtype, form: Quantization) -> int:
    """Return the largest row count at which experts on such a GPU read no size on the host.

    With Triton; a CUDA graph can hold no more. 0: none; `ANY_ROWS`: no limit.
    """
    if form == "fp8" and takes_scaled(capability):
        return ANY_ROWS
    if dtype == torch.bfloat16 and capability[0] in (9, 10):
        return ANY_ROWS
    return most_few_rows(capability, form)


def require_bitsandbytes() -> None:
    """Raise MachineError if NF4 is requested on a GPU and bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineError(
            "nf4 on a GPU needs bitsandbytes, which is not installed",
            hint=f"{installation('nf4')}, or use --quantization fp8",
            code="machine.no-bitsandbytes",
        )
