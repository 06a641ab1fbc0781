"""Attention of one row, by each kernel, against scores and softmax written out."""

import pytest
import torch
from masks import plain_attention
from torch.nn.attention import SDPBackend

from hyimg_cli.kernels.attention import (
    attention_of,
    fused_attention,
    masked_attention,
    warn_of_slow_kernel,
)


def _row(queries: int, slots: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(queries, 6, 16, dtype=dtype),
        torch.randn(2, slots, 16, dtype=dtype),
        torch.randn(2, slots, 16, dtype=dtype),
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "slots"), [(1, 1), (1, 9), (5, 5), (5, 23)])
@pytest.mark.parametrize("attention", [masked_attention, fused_attention])
def test_equals_the_plain_twin(attention, queries: int, slots: int, is_causal: bool) -> None:
    row = _row(queries, slots)
    expected = plain_attention(*row, is_causal)
    torch.testing.assert_close(attention(*row, is_causal), expected, atol=1e-6, rtol=1e-5)


def test_bfloat16() -> None:
    row = _row(7, 30, torch.bfloat16)
    expected = plain_attention(*row, True)
    assert expected.dtype == torch.bfloat16
    for attention in (masked_attention, fused_attention):
        torch.testing.assert_close(attention(*row, True), expected, atol=2e-2, rtol=2e-2)


def test_a_hidden_key_has_no_influence() -> None:
    q, keys, values = _row(3, 8)
    before = plain_attention(q, keys, values, True)
    values[:, 6:] += 1
    after = plain_attention(q, keys, values, True)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_a_cpu_keeps_the_attention_it_had() -> None:
    assert attention_of(torch.device("cpu")) is masked_attention
    assert attention_of(torch.device("cuda")) is fused_attention


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen", "told"),
    [
        ((9, 0), torch.bfloat16, SDPBackend.FLASH_ATTENTION, True),
        ((9, 0), torch.bfloat16, SDPBackend.CUDNN_ATTENTION, False),
        ((8, 9), torch.bfloat16, SDPBackend.FLASH_ATTENTION, False),
        ((9, 0), torch.float32, SDPBackend.MATH, False),
    ],
)
def test_the_loss_of_the_quickest_kernel_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    dtype: torch.dtype,
    chosen: SDPBackend,
    told: bool,
) -> None:
    """What torch takes: it may pass over a cuDNN that could."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: int(chosen))
    warn_of_slow_kernel(torch.device("cpu"), dtype)
    assert ("does not use cuDNN's kernel" in caplog.text) == told
