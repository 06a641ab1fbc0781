"""The VAE in other precisions and orders in memory: about the same picture, by rounding alone."""

from typing import Any

import pytest
import torch

from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3 import row_chunks
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3, decodes_in_half
from hyimg_cli.models.hunyuan_image3.row_chunks import _moments_at_once
from hyimg_cli.settings.run import ModelChoice, VaeDtype

CHOICE = ModelChoice(device="cpu")


def _decoded(model: Any) -> torch.Tensor:
    latents = torch.randn(32, 4, 4, generator=torch.Generator().manual_seed(0))
    channels = model.network.arch.vae.latent_channels
    pixels: torch.Tensor = model.decode_latents(latents[:channels])
    return pixels


@pytest.fixture(scope="module")
def plain() -> Any:
    return registry.load(CHOICE)


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda:0", True),
        ("auto", "balanced", True),
        ("float32", "cuda:0", False),
        ("float16", "cpu", True),
    ],
)
def test_a_gpu_decodes_in_half_as_upstream_does(
    asked: VaeDtype, device: str, expected: bool
) -> None:
    assert decodes_in_half(asked, device) is expected


@pytest.mark.thorough
def test_float16_is_float32_within_rounding(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _decoded(plain)
    half = HunyuanImage3(plain.network, plain.prompter, decodes_in_half=True)
    for most in (row_chunks.VAE_CHUNK_BYTES, 20_000):  # in one piece, and chunk by chunk
        monkeypatch.setattr(row_chunks, "VAE_CHUNK_BYTES", most)
        found = _decoded(half)
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        assert (found - expected).abs().max() < 0.02
    assert plain.network.vae.decoder.conv_in.weight.dtype == torch.float32


def test_a_variance_beyond_float16_is_none_too_large() -> None:
    x = torch.tensor([-600.0, 600.0]).repeat(64).view(1, 4, 2, 4, 4)
    variance, mean = _moments_at_once(x.half(), 2)
    assert variance.tolist() == [[360_000.0] * 2]
    assert mean.abs().max() < 1e-6
