"""What is done row by row: chosen by device, the plain twin against torch, and two claims."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hyimg_cli.kernels import transfer
from hyimg_cli.kernels.choice import ops_of
from hyimg_cli.kernels.ops import PLAIN, PlainOps
from hyimg_cli.spec import compilers

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_a_cpu_runs_the_plain_twin() -> None:
    assert ops_of(torch.device("cpu")) is PLAIN


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_a_gpu_runs_triton() -> None:
    assert type(ops_of(torch.device("cuda:1"))).__name__ == "FusedOps"


def test_a_gpu_without_triton_says_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for lacking in ("no triton", "no compiler"):
        monkeypatch.setattr(compilers, "find_spec", lambda name, has=lacking[3] == "c": has or None)
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
        compilers.triton_lacks.cache_clear()
        assert ops_of(torch.device("cuda:0")) is PLAIN
    compilers.triton_lacks.cache_clear()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "triton is not installed",
        "a C compiler is missing",
    ]


def test_the_norm_is_torchs_in_float32_and_rounds_twice_in_fewer_bits() -> None:
    x, weight = torch.randn(8, 256), 1 + 0.1 * torch.randn(256)
    expected = F.rms_norm(x, (256,), weight, 1e-5)
    torch.testing.assert_close(PlainOps().norm(x, weight, 1e-5), expected, atol=1e-6, rtol=1e-6)
    half, scale = x.bfloat16(), weight.bfloat16()
    twice = scale * F.rms_norm(half.float(), (256,), None, 1e-5).bfloat16()
    assert (PlainOps().norm(half, scale, 1e-5) != twice).float().mean() < 0.01
    # Why torch's own is not taken on a GPU: it rounds once.
    assert (F.rms_norm(half, (256,), scale, 1e-5) != twice).float().mean() > 0.1


def test_three_parts_in_bfloat16_are_all_of_a_float32() -> None:
    """What the router's kernel for many rows relies on."""
    weight = torch.randn(100_000) * torch.logspace(-6, 6, 100_000)
    high = weight.bfloat16()
    rest = weight - high.float()
    middle = rest.bfloat16()
    low = (rest - middle.float()).bfloat16()
    assert torch.equal(low.double() + middle.double() + high.double(), weight.double())


def test_kernels_start_on_their_device_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    for count, device in ((2, "cpu"), (1, "cuda:0"), (2, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        transfer.current(torch.device(device))
    assert entered == [torch.device("cuda:1")]
