"""The picture VAE tile by tile: the released rule, diffusers' blend, ranks, and the flag."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from hyimg_cli.errors import UsageError
from hyimg_cli.models import registry
from hyimg_cli.models.hunyuan_image3 import row_chunks
from hyimg_cli.models.hunyuan_image3.config import VaeArchitecture
from hyimg_cli.models.hunyuan_image3.vae import TiledPicture, Vae
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.job import Size
from hyimg_cli.tiling.tiles import forecast

SMALL = VaeArchitecture(
    block_out_channels=(32, 32, 64),
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


class Loops:
    """The released tiled decode as its own loops do it: all frames blended, the last one taken."""

    blend_v = AutoencoderKLHunyuanVideo15.blend_v
    blend_h = AutoencoderKLHunyuanVideo15.blend_h

    def decode(self, vae: Vae, latents: torch.Tensor) -> torch.Tensor:
        z = vae.unscaled(latents)
        grid = [
            [vae.decoder(z[..., y : y + 8, x : x + 8]) for x in range(0, z.shape[-1], 6)]
            for y in range(0, z.shape[-2], 6)
        ]
        rows = []
        for i, row in enumerate(grid):
            cut = []
            for j, tile in enumerate(row):
                if i > 0:
                    tile = self.blend_v(grid[i - 1][j], tile, 8)
                if j > 0:
                    tile = self.blend_h(row[j - 1], tile, 8)
                cut.append(tile[..., :24, :24])
            rows.append(torch.cat(cut, dim=-1))
        return torch.cat(rows, dim=-2)[:, :, -1]


@pytest.fixture(scope="module")
def vae() -> Vae:
    torch.manual_seed(4)
    return Vae(SMALL).requires_grad_(False)


@pytest.mark.parametrize("grid", [(9, 5), (8, 20), (19, 13)])
def test_equal_to_the_released_loops(vae: Vae, grid: tuple[int, int]) -> None:
    latents = torch.randn(2, 8, *grid)
    tiled = TiledPicture(vae).decode(latents)
    expected = torch.cat([Loops().decode(vae, one) for one in latents.split(1)])
    assert torch.equal(tiled, expected)
    untiled = vae.decode(latents)
    assert tiled.shape == untiled.shape
    assert not torch.equal(tiled, untiled)


def test_a_picture_within_a_tile_is_not_changed(vae: Vae) -> None:
    latents = torch.randn(1, 8, 8, 7)
    assert torch.equal(TiledPicture(vae).decode(latents), vae.decode(latents))


def test_a_tile_has_the_same_bits_where_nobody_turned_gradients_off(
    vae: Vae, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a rank: with gradients the VAE would take one chunk, and round otherwise."""
    monkeypatch.setattr(row_chunks, "VAE_CHUNK_BYTES", 1 << 12)
    latents, tiled = torch.randn(1, 8, 1, 8, 7), TiledPicture(vae)
    with torch.no_grad():
        expected = tiled.decode_tile(latents)
    assert torch.is_grad_enabled()
    assert torch.equal(tiled.decode_tile(latents), expected)


def test_tiles_of_the_released_checkpoint() -> None:
    widths = (32, 32, 64, 64, 64)
    released = replace(
        SMALL, block_out_channels=widths, ffactor_spatial=16, ffactor_temporal=4, sample_size=384
    )
    with torch.device("meta"):
        tiling = TiledPicture(Vae(released)).tiling
    assert (tiling.tile, tiling.stride, tiling.pixels) == (24, 18, 16)
    found = forecast(tiling, (1216 // 16, 832 // 16), 4, 1)
    assert (found.down, found.across) == (5, 3)


def test_a_tile_of_broken_cells_is_refused(vae: Vae) -> None:
    odd = Vae(replace(SMALL, sample_size=30))
    with pytest.raises(UsageError, match="30 px is not a multiple of 4 latent cells"):
        TiledPicture(odd)


def test_a_model_loaded_for_tiles_decodes_in_tiles() -> None:
    choice = ModelChoice(registry.EMBEDDED)
    whole, tiled = registry.load(choice), registry.load(replace(choice, vae_use_tiling=True))
    latents = whole.initial_latents(Bucket(0, Size(64, 64)), seed=1).repeat(1, 2, 3)
    expected = TiledPicture(whole.network.vae).decode(latents[None])[0]  # type: ignore[attr-defined]
    found = tiled.decode_latents(latents)
    assert torch.equal(found, (expected / 2 + 0.5).clamp(0, 1).permute(1, 2, 0))
    assert not torch.equal(found, whole.decode_latents(latents))


def test_the_flag_reaches_the_run_and_its_keys(
    run_cli: Callable[..., Any],
    write_manifest: Callable[..., Path],
    read_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    job = {"custom_id": "a", "task": "t2i", "prompt": "a red circle", "bot_task": "none"}
    manifest = write_manifest(job | {"seed": 3, "num_inference_steps": 2})
    lines = []
    for name, flags in (("whole", ()), ("tiled", ("--vae-use-tiling",))):
        out = tmp_path / name
        assert run_cli("generate", manifest, *flags, "-q", "--no-prewarm", "-o", out).code == 0
        lines += read_lines(out / "results.jsonl")
    assert lines[0]["key"] != lines[1]["key"]
    # The embedded model's pictures are one tile.
    assert lines[0]["outputs"][0]["pixel_sha256"] == lines[1]["outputs"][0]["pixel_sha256"]
    flags = json.loads((tmp_path / "tiled" / "run.json").read_text())["flags"]
    assert flags["vae_use_tiling"] == {"value": True, "origin": "flag"}
