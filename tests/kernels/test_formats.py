"""Experts' weights in 8 and in 4 bits: how far off, how many bytes, and as bitsandbytes has
them.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels import cases
from torch.utils._python_dispatch import TorchDispatchMode

from hyimg_cli.kernels.formats import (
    BLOCK,
    LEVELS,
    Fp8Rows,
    Nf4Blocks,
    by_bitsandbytes,
    dense,
    dequantize_nf4,
    dequantize_rows,
    empty_stack,
    one,
    quantize_nf4,
    quantize_rows,
)

WIDEST_GAP = max(b - a for a, b in pairwise(LEVELS))


class Passes(TorchDispatchMode):
    """Names of operations that read or write a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view and not op.__name__.startswith("empty"):
            self.names.append(op.__name__)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_in_e4m3_are_made_dense_to_the_bit_in_two_passes(dtype: torch.dtype) -> None:
    stack = empty_stack("fp8", 3, 20, 64, torch.device("cpu"))
    for expert in range(3):
        stack.put(expert, torch.randn(20, 64) * 1e-3**expert)
    with Passes() as passes:
        found = dense(stack, dtype)
    values_EOI, scale_EO = stack.tensors
    assert torch.equal(found, (values_EOI.float() * scale_EO[..., None]).to(dtype))
    assert torch.equal(found, torch.stack([stack.one(expert, dtype) for expert in range(3)]))
    assert len(passes.names) <= 2 * 3


@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_a_row_in_e4m3_is_off_by_a_sixteenth_at_most(size: float) -> None:
    rows = torch.randn(50, 200) * size
    values, scale = quantize_rows(rows)
    off = (dequantize_rows(values, scale, torch.float32) - rows).abs()
    # Below the smallest normal number, 2**-6, the step is 2**-9 and no longer shrinks.
    assert (off <= rows.abs() / 16 * 1.001 + scale[:, None] * 2**-10 * 1.001).all()
    assert values.float().abs().amax(dim=1).eq(448).all()


def test_a_row_of_zeros_and_one_with_an_outlier() -> None:
    rows = torch.zeros(2, 64)
    rows[1, 3] = 1e4
    back = dequantize_rows(*quantize_rows(rows), torch.float32)
    torch.testing.assert_close(back, rows)


@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_a_block_in_nf4_is_off_by_half_a_gap_at_most(size: float) -> None:
    weight = torch.randn(40, 96) * size
    packed, absmax = quantize_nf4(weight)
    off = (dequantize_nf4(packed, absmax, torch.float32) - weight.flatten()).abs().view(-1, BLOCK)
    assert (off <= absmax[:, None] * WIDEST_GAP / 2 * 1.001).all()
    assert off.max() > 0


def test_levels_themselves_come_back_unchanged() -> None:
    weight = torch.tensor(LEVELS).repeat(8).view(2, 64)
    back = dequantize_nf4(*quantize_nf4(weight), torch.float32)
    assert torch.equal(back.view(2, 64), weight)


@pytest.mark.parametrize(("form", "bits"), [("fp8", 8), ("nf4", 4)])
def test_a_stack_takes_the_bytes_of_its_format(form: str, bits: int) -> None:
    stack = cases.held(torch.randn(3, 64, 128), form, torch.float32)
    assert isinstance(stack, Fp8Rows | Nf4Blocks)
    scales = 3 * 64 if form == "fp8" else 3 * 64 * 128 // BLOCK
    assert sum(t.nbytes for t in stack.tensors) == 3 * 64 * 128 * bits // 8 + 4 * scales
    assert stack.shape == (3, 64, 128)


@pytest.mark.parametrize("form", cases.FORMATS)
def test_one_expert_is_its_part_of_all(form: str) -> None:
    stack = cases.held(torch.randn(4, 32, 64), form, torch.float32)
    every = dense(stack, torch.bfloat16)
    assert every.dtype == torch.bfloat16
    for expert in range(4):
        assert torch.equal(one(stack, expert, torch.bfloat16), every[expert])


def test_nf4_needs_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="whole blocks"):
        empty_stack("nf4", 2, 3, 7, torch.device("cpu"))


def test_nf4_is_what_bitsandbytes_makes_of_it() -> None:
    """Its kernels read our bytes on a GPU, so that ours must be its own."""
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed"
    )
    weight = torch.randn(2, 192, 96)
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    stack = cases.held(weight, "nf4", torch.float32)
    assert isinstance(stack, Nf4Blocks)
    assert torch.equal(theirs.flatten(), stack.packed_EOH.flatten())
    assert torch.equal(state.absmax, stack.absmax_EB.flatten())
    back = by_bitsandbytes(stack, torch.float32)
    assert torch.equal(back, dense(stack, torch.float32))
