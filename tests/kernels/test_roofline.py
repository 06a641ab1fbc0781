"""What the prediction counts: small known operations, and a layer at its real size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the benchmarks are not part of this copy"
)
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def _ops(call: Any, **facts: Any) -> list[Any]:
    from shapes.counting import Facts, counted

    with counted(Facts(**facts)) as counter:
        call()
    return counter.ops


def _made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_product_and_a_sum(fake: None) -> None:
    from shapes.counting import Rates

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
    from hyimg_cli.kernels.fused_rows import FusedRows

    x, weight = _made(5, 64), _made(64)
    (norm,) = _ops(lambda: FusedRows().norm(x, weight, 1e-5))
    assert norm.bytes == 2 * (2 * 5 * 64 + 64)
    gate_and_up, down = _made(6, 2 * 96, 64), _made(6, 64, 96)
    index, share = torch.empty(5, 2, dtype=torch.int64, device="cuda"), _made(5, 2)
    both = _ops(lambda: decode_experts(x, share, index, gate_and_up, down))
    # Each of ten choices reads an expert, however many there are; in between is float32.
    weights = 2 * 10 * 3 * 64 * 96
    around = 2 * 5 * 64 * 2 + 2 * 4 * 10 * 96 + 2 * 8 * 10 + 2 * 10
    assert sum(op.bytes for op in both) == weights + around


def test_a_layer_at_its_real_size(parts: None) -> None:
    """FLOP and bytes beside the floors', which are counted from the numbers of the network."""
    pytest.importorskip("triton")
    import roofline
    from shapes.scale import REAL

    found = {row.name: row for row in roofline.rows_of(REAL, "dense")}
    denoise = found["denoise step, 2 rows"]
    assert denoise.teraflop == pytest.approx(7.43, abs=0.02)
    assert denoise.goal == 12.5
    assert denoise.milliseconds == pytest.approx(denoise.products + denoise.rest)
    # Experts, attention, projections: at 760 TFLOP/s the floor of real_shape.py.
    assert denoise.products == pytest.approx(9.78, abs=0.05)
    # What stands around them is what the kernels of this layer are for.
    assert denoise.rest < 0.96
    assert denoise.launches <= 30
    decode = found["AR decode, 1 row, graph"]
    assert decode.milliseconds == pytest.approx(0.190, abs=0.002)
    assert decode.launches <= 15
    first = found["first step without reuse"].milliseconds
    assert first == pytest.approx(2 * found["prefill"].milliseconds + denoise.milliseconds)
