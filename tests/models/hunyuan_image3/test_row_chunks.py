"""The VAE chunk by chunk: equal to the whole, whatever the height of a chunk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hyimg_cli.models.hunyuan_image3 import row_chunks
from hyimg_cli.models.hunyuan_image3.config import VaeArchitecture
from hyimg_cli.models.hunyuan_image3.row_chunks import RowChunks
from hyimg_cli.models.hunyuan_image3.vae import (
    Downsample,
    FrameConv3d,
    ResnetBlock,
    Upsample,
    Vae,
)

SMALL = VaeArchitecture(
    block_out_channels=(32, 64, 64),
    in_channels=3,
    out_channels=3,
    latent_channels=8,
    layers_per_block=1,
    ffactor_spatial=4,
    ffactor_temporal=2,
    sample_size=32,
    scaling_factor=0.5,
    shift_factor=0.25,
)
# Mathematics is shown by float64; float32 is what pictures are drawn in.
CLOSE = {
    torch.float64: {"atol": 1e-11, "rtol": 1e-11},
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
}


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    with patch.object(row_chunks, "VAE_CHUNK_BYTES", nbytes), torch.no_grad():
        yield


def whole(module: Callable[[Tensor], Any], x_BCTYX: Tensor) -> Any:
    """The plain form: everything in one piece, by torch's own modules."""
    with chunks_of(1 << 40):
        return module(x_BCTYX.clone())


def heights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the chunks to come."""
    found: list[int] = []
    plain = RowChunks._chunk

    def noted(self: RowChunks, compute: Any, start: int) -> Tensor:
        made = plain(self, compute, start)
        found.append(made.shape[3])
        return made

    monkeypatch.setattr(RowChunks, "_chunk", noted)
    return found


def seeded(make: Callable[[], Any], dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(5)
    module = make().to(dtype)
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return module


@pytest.mark.parametrize("frames", [1, 4])
def test_a_block_in_bands_of_any_height(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = seeded(lambda: ResnetBlock(32))
    made = heights(monkeypatch)
    for rows, nbytes in product((1, 2, 7, 12), (1, 30_000, 60_000, 200_000)):
        x_BCTYX = 3 + 2 * torch.randn(2, 32, frames, rows, 5, dtype=torch.float64)
        expected = whole(block, x_BCTYX)
        with chunks_of(nbytes):
            torch.testing.assert_close(block(x_BCTYX), expected, **CLOSE[torch.float64])
    assert made.count(1) > 12
    assert len(set(made)) > 2


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("make", [Upsample, Downsample])
def test_steps_between_levels(make: Any, frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = seeded(lambda: make(32, 64, frames))
    made = heights(monkeypatch)
    for rows, nbytes in product((2, 6, 14), (1, 400_000)):
        x_BCTYX = torch.randn(2, 32, 4, rows, 6, dtype=torch.float64)
        kept, expected = x_BCTYX.clone(), whole(step, x_BCTYX)
        with chunks_of(nbytes):
            torch.testing.assert_close(step(x_BCTYX), expected, **CLOSE[torch.float64])
        assert torch.equal(x_BCTYX, kept)
    # One row becomes two, or two become one.
    assert min(made) == (2 if make is Upsample else 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_whole_vae(frames: int, dtype: torch.dtype) -> None:
    vae = seeded(lambda: Vae(replace(SMALL, ffactor_temporal=frames)), dtype)
    pixels, latents = torch.rand(2, 3, 20, 12, dtype=dtype) * 2 - 1, torch.randn(2, 8, 5, 3)
    moments, drawn = whole(vae.encode_moments, pixels), whole(vae.decode, latents.to(dtype))
    for nbytes in (1, 100_000, 300_000):
        with chunks_of(nbytes):
            for found, expected in zip(vae.encode_moments(pixels), moments, strict=True):
                torch.testing.assert_close(found, expected, **CLOSE[dtype])
            picture = vae.decode(latents.to(dtype))
        torch.testing.assert_close(picture, drawn, **CLOSE[dtype])
        assert picture.is_contiguous()


def test_what_is_given_to_the_vae_stays_as_it_is() -> None:
    vae = seeded(lambda: Vae(SMALL), torch.float32)
    pixels, latents = torch.rand(1, 3, 16, 16), torch.randn(1, 8, 4, 4)
    kept = pixels.clone(), latents.clone()
    for nbytes in (1, 1 << 40):
        with chunks_of(nbytes):
            vae.encode_moments(pixels), vae.decode(latents)
    assert torch.equal(pixels, kept[0])
    assert torch.equal(latents, kept[1])


def test_gradients_are_those_of_the_whole_and_of_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = seeded(lambda: Vae(SMALL))
    pixels = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    made = heights(monkeypatch)
    monkeypatch.setattr(row_chunks, "VAE_CHUNK_BYTES", 1)
    drawn = vae.decode(vae.encode_moments(pixels)[0])
    drawn.square().mean().backward()
    assert not made
    assert all(weight.grad is not None for weight in vae.parameters())
    with chunks_of(1):
        again = vae.decode(vae.encode_moments(pixels)[0])
    torch.testing.assert_close(again, drawn.detach(), **CLOSE[torch.float64])


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_the_last_frame_alone(frames: int) -> None:
    convolution = seeded(lambda: FrameConv3d(5, 7, 3))
    x_BCTYX = torch.randn(2, 5, frames, 6, 4, dtype=torch.float64)
    expected = nn.Conv3d.forward(convolution, x_BCTYX)[:, :, -1:]
    torch.testing.assert_close(convolution.last_frame(x_BCTYX), expected)


@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("moments", [row_chunks._moments_by_pieces, row_chunks._moments_at_once])
def test_statistics_are_as_exact_as_the_librarys(moments: Any, offset: float) -> None:
    """More values than a piece has, and a mean far from zero."""
    torch.manual_seed(0)
    x_BCTYX = torch.randn(2, 6, 2, 210, 170) * torch.rand(2, 6, 1, 1, 1) + offset
    variance_BG, mean_BG = moments(x_BCTYX, 3)
    exact = x_BCTYX.double().reshape(2, 3, -1)
    torch.testing.assert_close(mean_BG.double(), exact.mean(2), atol=1e-6, rtol=1e-6)
    expected = exact.var(2, correction=0)
    torch.testing.assert_close(variance_BG.double(), expected, atol=0, rtol=1e-6)
