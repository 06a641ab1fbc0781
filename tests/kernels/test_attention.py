"""Attention of one row, by each kernel, against scores and softmax written out."""

import threading
from typing import Any

import pytest
import torch
from masks import plain_attention
from torch.nn.attention import SDPBackend

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.attention import (
    PinnedAttention,
    fused_attention,
    masked_attention,
    pinned,
    row_attention,
    warn_of_slow_kernel,
)
from hyimg_cli.models.hunyuan_image3.vae import SpatialAttention


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
    assert row_attention(torch.device("cpu")) is masked_attention
    assert row_attention(torch.device("cuda")) is fused_attention


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
    assert ("not cuDNN's kernel" in caplog.text) == told


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_a_pinned_kernel_is_the_one_that_runs(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, and a single query, are left to the plain twin, which is never asked for others."""
    attend = pinned(masked_attention, backend, heads=(6, 2), width=16, like=torch.zeros(1))
    for queries, slots, is_causal in ((5, 23, False), (5, 5, True), (5, 23, True), (1, 9, False)):
        row, chosen = _row(queries, slots), []
        real = torch.nn.functional.scaled_dot_product_attention

        def sdpa(*arguments, real=real, chosen=chosen, **more):
            chosen.append(torch.backends.cuda.math_sdp_enabled())
            chosen.append(torch.backends.cuda.flash_sdp_enabled())
            return real(*arguments, **more)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        expected = plain_attention(*row, is_causal)
        torch.testing.assert_close(attend(*row, is_causal), expected, atol=1e-6, rtol=1e-5)
        monkeypatch.undo()
        is_pinned = queries > 1 and (queries == slots or not is_causal)
        assert chosen == ([backend == "math", backend == "flash"] if is_pinned else [True, True])


def test_a_pinned_kernel_is_not_found_by_the_thread_that_encodes_beside() -> None:
    """torch's switches are the process's, and a VAE's attention in float32 is not cuDNN's."""
    row, failed = _row(5, 23), []

    def beside() -> None:
        try:
            SpatialAttention(32)(torch.randn(1, 32, 1, 2, 2))
        except RuntimeError as error:
            failed.append(error)

    other = threading.Thread(target=beside)

    def attend(*arguments: Any) -> torch.Tensor:
        other.start()
        other.join(0.2)
        return masked_attention(*arguments)

    own = PinnedAttention(attend, "cudnn")
    with pytest.raises(RuntimeError, match="No viable backend"):
        own.strict(*row, False)
    other.join()
    assert not failed


def test_a_pin_that_has_no_kernel_is_refused_beforehand() -> None:
    like = torch.zeros(1)
    with pytest.raises(MachineError, match="sdpa_backend cudnn has no kernel for 6 heads of 16"):
        pinned(masked_attention, "cudnn", heads=(6, 2), width=16, like=like)
    auto = pinned(fused_attention, "auto", heads=(6, 2), width=16, like=like)
    assert auto is fused_attention


def test_a_pin_that_is_lost_for_a_length_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    attend, row = PinnedAttention(masked_attention, "cudnn"), _row(5, 23)
    for _ in range(2):
        found = attend(*row, False)
        torch.testing.assert_close(found, plain_attention(*row, False), atol=1e-6, rtol=1e-5)
    assert caplog.text.count("has no kernel for 5 queries of 23 keys") == 1


def test_another_fault_of_a_pinned_kernel_stays_one() -> None:
    def broken(*_):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        PinnedAttention(broken, "math")(*_row(5, 23), False)
