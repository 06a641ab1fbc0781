"""What is counted on the fake GPU: small known operations, and a layer at its real size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu.counting import Facts, Rates, counted
from fake_gpu.device import fake_gpu
from fake_gpu.layer_rows import LayerRows, milliseconds
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hyimg_cli.kernels.attention import packed_attention_of

HALF = torch.bfloat16


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def _ops(call: Any, **facts: Any) -> list[Any]:
    with counted(Facts(**facts)) as counter:
        call()
    return counter.ops


def _made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_product_and_a_sum(fake: None) -> None:
    x, weight = _made(100, 64), _made(32, 64)
    (product,) = _ops(lambda: F.linear(x, weight))
    assert product.flops == 2 * 100 * 64 * 32
    assert product.bytes == 2 * (100 * 64 + 64 * 32 + 100 * 32)
    (added,) = _ops(lambda: x + x.clone()[0])[1:]
    assert (added.flops, added.bytes) == (0, 2 * (100 * 64 + 64 + 100 * 64))
    # The larger of two times: a microsecond of bytes, here, and nearly none of FLOP.
    rates = Rates(bfloat16=1e9, memory_tb_s=product.bytes / 1e6)
    assert rates.milliseconds(product) == pytest.approx(1e-3)
    assert Rates(bfloat16=1.0).milliseconds(product) == pytest.approx(product.flops / 1e9)


def test_views_cost_nothing_and_rows_what_they_hold(fake: None) -> None:
    x = _made(100, 64)
    assert _ops(lambda: x.view(50, 128).mT[:3].unflatten(1, (5, 10)).expand(3, 5, 10)) == []
    assert _ops(lambda: torch.empty_like(x)) == []
    rows = torch.empty(7, dtype=torch.int64, device="cuda")
    (gathered,) = _ops(lambda: x[rows])
    assert gathered.bytes == 2 * 2 * 7 * 64 + 7 * 8
    (written,) = _ops(lambda: x.index_copy_(0, rows, x[:7]))
    assert written.bytes == 2 * 2 * 7 * 64 + 7 * 8
    (copied,) = _ops(lambda: x[:10].copy_(x[10:20]))
    assert copied.bytes == 2 * 2 * 10 * 64
    (wide,) = _ops(lambda: x.float())
    assert wide.bytes == 6 * 100 * 64


def test_attention_without_a_mask_in_memory(fake: None) -> None:
    from hyimg_cli.kernels.attention import fused_attention

    q, keys, values = _made(10, 8, 16), _made(2, 30, 16), _made(2, 30, 16)
    (all_of_them,) = _ops(lambda: fused_attention(q, keys, values, False))
    assert all_of_them.flops == 4 * 8 * 16 * 10 * 30
    assert all_of_them.bytes == 2 * (2 * 10 * 8 * 16 + 2 * 2 * 30 * 16)
    (causal,) = _ops(lambda: fused_attention(q, keys, values, True))
    assert causal.flops == 4 * 8 * 16 * (10 * 30 - 45)


def test_grouped_products_read_the_chosen_experts(fake: None) -> None:
    rows, weights = _made(32, 64), _made(4, 128, 64)
    ends = torch.empty(4, dtype=torch.int32, device="cuda")
    (product,) = _ops(lambda: F.grouped_mm(rows, weights.mT, offs=ends), experts=3.0)
    assert product.flops == 2 * 32 * 64 * 128
    assert product.bytes == 2 * (32 * 64 + 3 * 128 * 64 + 32 * 128) + 4 * 4


def test_triton_kernels_are_counted_and_not_started(fake: None) -> None:
    pytest.importorskip("triton")
    from hyimg_cli.kernels.decode import decode_experts
    from hyimg_cli.kernels.experts import RoutedTokens
    from hyimg_cli.kernels.fused_ops import FusedOps

    x, weight = _made(5, 64), _made(64)
    (norm,) = _ops(lambda: FusedOps().norm(x, weight, 1e-5))
    assert norm.bytes == 2 * (2 * 5 * 64 + 64)
    gate_and_up, down = _made(6, 2 * 96, 64), _made(6, 64, 96)
    index, share = torch.empty(5, 2, dtype=torch.int64, device="cuda"), _made(5, 2)
    both = _ops(lambda: decode_experts(RoutedTokens(x, share, index), (gate_and_up, down)))
    # Each of ten choices reads an expert, however many there are; in between is float32.
    weights = 2 * 10 * 3 * 64 * 96
    around = 2 * 5 * 64 * 2 + 2 * 4 * 10 * 96 + 2 * 8 * 10 + 2 * 10
    assert sum(op.bytes for op in both) == weights + around


def test_a_layer_at_its_real_size(tmp_path: Path) -> None:
    """What surrounds the products is few launches and little time: the kernels of a layer are for
    that. Milliseconds are those that one H200 needs at least.
    """
    pytest.importorskip("triton")
    with fake_gpu() as gpu:
        rows = LayerRows(tmp_path, "dense")
        denoise, decode, prefill = rows.denoise(), rows.decode(1), rows.prefill()
        texts = rows.texts(16)
        is_packed = packed_attention_of(torch.device("cuda:0"), HALF) is not None
    assert (gpu.reads, gpu.waits) == ({}, {})
    calls = [sum(op.name == "attention" for op in ops) for ops in (denoise, prefill, texts)]
    assert calls == ([2, 2, 1] if is_packed else [4, 6, 16])
    assert sum(op.flops for op in denoise) / 1e12 == pytest.approx(7.43, abs=0.02)
    products = [op for op in denoise if op.is_product]
    # Experts, attention, projections: at 760 TFLOP/s the floor of benchmarks/real_shape.py.
    assert milliseconds(products) == pytest.approx(9.78, abs=0.05)
    # Prefix and canvas are joined.
    assert milliseconds(denoise) - milliseconds(products) < 0.98
    assert len(denoise) <= (25 if is_packed else 30)
    assert milliseconds(decode) == pytest.approx(0.190, abs=0.002)
    assert len(decode) <= 15
    assert len(prefill) <= (25 if is_packed else 40)
