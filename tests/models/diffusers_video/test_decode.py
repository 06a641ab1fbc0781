"""Frames are diffusers' decode; its pieces put together by hand are the same bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processors import is_same
from torch import Tensor

from hyimg_cli.errors import JobError, OutputError
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.latent_video import frames
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import TileRule
from hyimg_cli.spec.job import Size, VideoJob

Draw = Callable[[DiffusersVideo, VideoJob], Tensor]


def noise(model: DiffusersVideo, size: Size, num_frames: int) -> Tensor:
    grid = model.card.latent_grid(size, num_frames)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, model.card.latent_channels, *grid, generator=generator)


def video(model: DiffusersVideo, latents: Tensor) -> np.ndarray:
    return np.concatenate(list(model.decode_latents(latents)))


@pytest.mark.parametrize("name", ["hunyuan", "wan", "wan22"])
def test_frames_are_the_pipelines_pictures(
    models: dict[str, DiffusersVideo], plain: Any, draw: Draw, job: VideoJob, name: str
) -> None:
    """From noise to uint8, against `output_type="pil"`: the library's own rounding."""
    job = replace(job, num_inference_steps=2)
    model = models["hunyuan-stock" if name == "hunyuan" else name]
    pictures = plain(name, job, output="pil")[0]
    expected = np.stack([np.asarray(picture) for picture in pictures])
    found = video(model, draw(model, job))
    assert found.dtype == np.uint8
    assert found.shape == (9, 48, 80, 3)
    assert is_same(found, expected)


@pytest.mark.parametrize(("name", "size"), [("hunyuan", Size(288, 320)), ("wan", Size(272, 288))])
def test_tiled_is_the_librarys_tiling_and_not_the_same_as_whole(
    models: dict[str, DiffusersVideo], name: str, size: Size
) -> None:
    model = models[name]
    latents = noise(model, size, 1)
    module = model.vae.module
    with torch.no_grad():
        module.enable_tiling()
        tiled = module.decode(model.vae.unscaled(latents), return_dict=False)[0]
        found = video(model, latents)
        module.disable_tiling()
        whole = module.decode(model.vae.unscaled(latents), return_dict=False)[0]
    assert found.shape == (1, size.height, size.width, 3)
    assert np.array_equal(found, np.concatenate(list(frames(tiled))))
    assert not torch.equal(tiled, whole)


@pytest.mark.parametrize(("name", "size"), [("hunyuan", Size(288, 320)), ("wan", Size(272, 288))])
def test_the_cards_rule_cuts_where_the_library_does(
    models: dict[str, DiffusersVideo], name: str, size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles that the decoder is given, by shape and by content."""
    model = models[name]
    rule, vae = model.card.tiles, model.vae
    latents = vae.unscaled(noise(model, size, 1))
    given: list[Tensor] = []
    inner = vae.module.decoder.forward

    def spy(tile: Tensor, *arguments: Any, **options: Any) -> Any:
        given.append(tile)
        return inner(tile, *arguments, **options)

    monkeypatch.setattr(vae.module.decoder, "forward", spy)
    with torch.no_grad():
        list(model.decoder(latents, vae.tiling))
        theirs, given = given, []
        for top in range(0, latents.shape[-2], rule.stride):
            for left in range(0, latents.shape[-1], rule.stride):
                rows = slice(top, top + rule.tile)
                vae.decode_tile(latents[..., rows, left : left + rule.tile])
    assert len(given) == len(theirs) == 4
    for one, other in zip(given, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_one_tile_over_everything_is_the_untiled_decode(
    models: dict[str, DiffusersVideo], name: str
) -> None:
    model = models[name]
    latents = model.vae.unscaled(noise(model, Size(48, 80), 9))
    with torch.no_grad():
        tile = model.vae.decode_tile(latents)
        by_hand = model.vae.finish(tile)
        pieces = list(model.decoder(latents, model.vae.tiling))
        assert len(pieces) == (1 if name == "hunyuan" else latents.shape[2])
        assert torch.equal(by_hand, torch.cat(pieces, dim=2))
    pixels = model.vae.tiling.pixels
    rows, columns = (cells * pixels for cells in latents.shape[-2:])
    assert tile.shape == (1, model.vae.tile_channels, model.vae.tile_frames(3), rows, columns)


def test_untiled_on_request(folders: dict[str, Path]) -> None:
    choice = ModelChoice(str(folders["hunyuan"]), device="cpu")
    tiled = registry.load_video(choice)
    whole = registry.load_video(replace(choice, vae_use_tiling=False))
    latents = noise(tiled, Size(272, 48), 1)
    assert not np.array_equal(video(tiled, latents), video(whole, latents))


@pytest.mark.parametrize(("name", "size"), [("hunyuan", Size(272, 48)), ("wan", Size(264, 16))])
def test_a_decode_out_of_memory_leaves_nothing_behind(
    models: dict[str, DiffusersVideo], name: str, size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither features of its first frames nor other tiles, of a later encode either; tiles of half
    the side are those of the library with its knobs halved.
    """
    model, latents = models[name], noise(models[name], size, 5)
    module, pixels = model.vae.module, torch.linspace(-1, 1, 3 * size.height * size.width)
    picture = pixels.view(1, 3, 1, size.height, size.width)
    before, encoded = video(model, latents), model.vae.encoded(picture, is_tiled=True)
    inner, calls = module.decoder.forward, [0]

    def short(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError
        return inner(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module.decoder, "forward", short)
        with pytest.raises(torch.OutOfMemoryError):
            video(model, latents)
    assert not any(getattr(module, "_feat_map", []))
    ((word, half),) = model.smaller_tilings(latents)
    assert word == "half"
    smaller = np.concatenate(list(model.decode_latents(latents, half)))
    knobs = [knob for knob in vars(module) if knob.startswith("tile_") and "factor" not in knob]
    with monkeypatch.context() as patch, torch.no_grad():
        for knob in knobs:
            patch.setattr(module, knob, getattr(module, knob) // 2)
        module.enable_tiling()
        theirs = module.decode(model.vae.unscaled(latents), return_dict=False)[0]
        module.disable_tiling()
    assert np.array_equal(smaller, np.concatenate(list(frames(theirs))))
    assert not np.array_equal(smaller, before)
    assert np.array_equal(video(model, latents), before)
    assert torch.equal(model.vae.encoded(picture, is_tiled=True), encoded)


def test_a_transformer_on_the_cpu_has_nowhere_to_go(
    tiny: DiffusersVideo, draw: Draw, job: VideoJob
) -> None:
    job = replace(job, num_inference_steps=1)
    before, (network,) = draw(tiny, job), tiny.networks
    held = [weight.data_ptr() for weight in network.parameters()]
    tiny.unload_transformer()
    assert torch.equal(draw(tiny, job), before)
    assert [weight.data_ptr() for weight in network.parameters()] == held


def test_a_replaced_decoder_is_asked(models: dict[str, DiffusersVideo]) -> None:
    model = models["hunyuan"]

    def halves(latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        yield from torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(1, 3, 2, 4, 4).split(1, dim=2)

    before, model.decoder = model.decoder, halves
    try:
        assert video(model, noise(model, Size(48, 80), 9)).shape == (2, 4, 4, 3)
    finally:
        model.decoder = before


def test_pieces_are_in_order_and_small() -> None:
    pixels = torch.linspace(-1, 1, 19).view(1, 1, 19, 1, 1).expand(1, 3, 19, 2, 4)
    pieces = list(frames(pixels))
    assert [len(piece) for piece in pieces] == [8, 8, 3]
    levels = np.concatenate(pieces)[:, 0, 0, 0].tolist()
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == (0, 255)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_video_that_is_not_finite_is_a_jobs_error(value: float) -> None:
    pixels = torch.rand(1, 3, 5, 4, 4)
    pixels[0, 1, 3, 2, 1] = value
    with pytest.raises(OutputError) as caught:
        frames(pixels)
    assert isinstance(caught.value, JobError)
    assert caught.value.code == "output-video.not-finite"


@pytest.mark.parametrize("name", ["hunyuan", "wan"])
def test_broken_latents_end_in_a_jobs_error(models: dict[str, DiffusersVideo], name: str) -> None:
    """Wan's VAE clamps, which leaves NaN but hides infinities: the latents are looked at too."""
    latents = noise(models[name], Size(48, 80), 5)
    latents[0, 0, 0, 0, 0] = float("inf")
    with pytest.raises(OutputError, match="not finite"):
        video(models[name], latents)


def test_the_vae_alone_can_be_loaded(folders: dict[str, Path]) -> None:
    """What a rank that only decodes tiles needs."""
    for name in ("hunyuan", "wan"):
        model = registry.load_video(ModelChoice(str(folders[name]), device="cpu"))
        assert model.vae.module is not None
        assert "networks" not in vars(model)


def test_wans_vae_stays_in_float32(folders: dict[str, Path]) -> None:
    model = registry.load_video(ModelChoice(str(folders["wan"]), dtype="bfloat16", device="cpu"))
    assert model.vae.module.dtype == torch.float32
    assert model.dtype_name == "bfloat16"


def test_a_vae_of_patches_in_pieces() -> None:
    """Wan 2.2 5B's: the decoder puts out 2 x 2 patches, twelve channels of half the rows."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    module = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.2, 0.3, 0.4],
        latents_std=[1.0, 2.0, 3.0, 4.0],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ).eval()
    vae = WanVae(module)
    latents = torch.randn(1, 4, 2, 3, 5)
    with torch.no_grad():
        tile = vae.decode_tile(latents)
        assert tile.shape == (1, vae.tile_channels, vae.tile_frames(2), 3 * 8, 5 * 8)
        assert vae.tiling.pixels == 8
        whole = module.decode(latents, return_dict=False)[0]
        assert whole.shape == (1, 3, 5, 48, 80)
        assert torch.equal(vae.finish(tile), whole)
        pieces = [vae.finish(piece) for piece in vae.stream(latents)]
        assert [piece.shape[2] for piece in pieces] == [1, 4]
        assert torch.equal(torch.cat(pieces, dim=2), whole)
