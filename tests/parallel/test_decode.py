"""Tiles over ranks against diffusers' own tiled decode: the same bits, whatever the grid."""

from collections.abc import Callable

import pytest
import torch
from tiny_vaes import VaeLoader

from hyimg_cli.models.diffusers_video.vaes import causal_mask
from hyimg_cli.parallel.ranks import RankPool
from hyimg_cli.tiling.decode import PatchParallelDecoder, decode_tiled
from hyimg_cli.tiling.tiles import forecast

CPU = torch.device("cpu")
CHANNELS = {"hunyuan-video": 4, "wan": 16, "wan-patches": 4}
Write = Callable[..., VaeLoader]


def latents(kind: str, frames: int, grid: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    shape = (1, CHANNELS[kind], frames, *grid)
    return torch.randn(shape, generator=generator).to(dtype)


def of_library(loader: VaeLoader, z: torch.Tensor) -> torch.Tensor:
    """One process, the official class, its own tiled decode; loaded from disk like every rank."""
    vae = loader.library()
    vae.enable_tiling()
    with torch.no_grad():
        return vae.decode(z).sample


@pytest.mark.parametrize(
    ("kind", "frames", "grid", "dtype", "counts"),
    [
        # A film's own sizes, at length: 480p and 720p.
        pytest.param(
            *("hunyuan-video", 1, (30, 53), torch.float32, (4,)), marks=pytest.mark.thorough
        ),
        pytest.param(
            *("hunyuan-video", 1, (45, 80), torch.bfloat16, (2, 4)), marks=pytest.mark.thorough
        ),
        ("hunyuan-video", 2, (17, 5), torch.float32, (1, 2, 4)),
        ("hunyuan-video", 2, (14, 17), torch.bfloat16, (1, 2, 4)),
        pytest.param(
            *("hunyuan-video", 3, (3, 7), torch.float32, (1, 2)), marks=pytest.mark.thorough
        ),
        pytest.param(*("wan", 2, (9, 33), torch.float32, (1, 2, 4)), marks=pytest.mark.thorough),
        ("wan", 1, (33, 26), torch.bfloat16, (4,)),
        ("wan-patches", 2, (17, 7), torch.float32, (1, 2, 4)),
        pytest.param(
            *("wan-patches", 2, (5, 33), torch.bfloat16, (4,)), marks=pytest.mark.thorough
        ),
    ],
)
def test_equal_to_the_library_in_one_process(
    pool: RankPool,
    vae_loader: Write,
    kind: str,
    frames: int,
    grid: tuple[int, int],
    dtype: torch.dtype,
    counts: tuple[int, ...],
) -> None:
    loader = vae_loader(kind, dtype)
    pool.load("vae", loader)
    z = latents(kind, frames, grid, dtype)
    expected = of_library(loader, z)
    for ranks in counts:
        decoder = PatchParallelDecoder(pool, ranks=ranks)
        found = decode_tiled(pool.here.parts["vae"], z) if ranks == 1 else decoder.decode(z)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), f"{ranks} ranks"


def test_what_travels_is_what_was_forecast(pool: RankPool, vae_loader: Write) -> None:
    pool.load("vae", vae_loader("hunyuan-video"))
    decoder = PatchParallelDecoder(pool, ranks=3)
    z = latents("hunyuan-video", 1, (17, 14), torch.float32)
    decoder.decode(z)
    report = decoder.report
    tiling = pool.here.parts["vae"].tiling
    told = forecast(tiling, (17, 14), 3, bytes_per_cell=3 * 16 * 16 * 4)
    assert report is not None
    assert [one.area for one in report.ranks] == [share.area for share in told.shares]
    assert [one.tiles for one in report.ranks] == [len(share.tiles) for share in told.shares]
    assert [one.sent_bytes for one in report.ranks[1:]] == [s.sent_bytes for s in told.shares[1:]]
    assert report.ranks[0].received_bytes == told.received_bytes
    assert [one.received_bytes for one in report.ranks[1:]] == [z.nbytes] * 2
    assert all(one.busy_s > 0 for one in report.ranks)


def test_ranks_without_tiles_are_left_in_peace(pool: RankPool, vae_loader: Write) -> None:
    loader = vae_loader("hunyuan-video", torch.bfloat16)
    pool.load("vae", loader)
    decoder = PatchParallelDecoder(pool)
    z = latents("hunyuan-video", 1, (17, 8), torch.bfloat16)
    assert torch.equal(decoder.decode(z), of_library(loader, z))
    assert decoder.report is not None
    assert [one.tiles for one in decoder.report.ranks] == [1, 1, 0, 0]
    assert [one.received_bytes for one in decoder.report.ranks][2:] == [0, 0]


def test_a_batch_is_decoded_item_by_item(pool: RankPool, vae_loader: Write) -> None:
    pool.load("vae", vae_loader("hunyuan-video", torch.bfloat16))
    z = latents("hunyuan-video", 1, (17, 8), torch.bfloat16)
    both = torch.cat([z, -z])
    decoder = PatchParallelDecoder(pool)
    assert torch.equal(decoder.decode(both), torch.cat([decoder.decode(z), decoder.decode(-z)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [None, 1, 2])
def test_the_mask_is_the_library_s_own(dtype: torch.dtype, batch: int | None) -> None:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as library

    theirs = library.HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    assert torch.equal(causal_mask(3, 5, dtype, CPU, batch), theirs(3, 5, dtype, CPU, batch))
