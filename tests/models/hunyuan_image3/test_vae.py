"""The autoencoder: the one-frame shortcut, shapes, and the released network's names and size."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hyimg_cli.models.hunyuan_image3.card import _vae_weights
from hyimg_cli.models.hunyuan_image3.config import VaeArchitecture
from hyimg_cli.models.hunyuan_image3.vae import (
    FrameConv3d,
    Vae,
    _depth_to_space,
    _space_to_depth,
)

RELEASED = VaeArchitecture(
    block_out_channels=(128, 256, 512, 1024, 1024),
    in_channels=3,
    out_channels=3,
    latent_channels=32,
    layers_per_block=2,
    ffactor_spatial=16,
    ffactor_temporal=4,
    sample_size=384,
    scaling_factor=0.562679178327931,
    shift_factor=None,
)
SMALL = replace(
    RELEASED,
    block_out_channels=(32, 32, 64),
    latent_channels=8,
    layers_per_block=1,
    ffactor_spatial=4,
    ffactor_temporal=2,
    sample_size=32,
)


@pytest.fixture(scope="module")
def released_shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Vae(RELEASED).state_dict().items()}


@pytest.mark.parametrize("kernel", [1, 3])
def test_one_frame_takes_the_same_value_as_a_plain_cubic_convolution(kernel: int) -> None:
    torch.manual_seed(0)
    convolution = FrameConv3d(5, 7, kernel)
    x_BCTYX = torch.randn(2, 5, 1, 6, 4)
    plain = nn.Conv3d.forward(convolution, x_BCTYX)
    torch.testing.assert_close(convolution(x_BCTYX), plain, atol=1e-6, rtol=1e-5)


def test_several_frames_meet_the_outer_taps() -> None:
    torch.manual_seed(0)
    convolution = FrameConv3d(5, 7, 3)
    x_BCTYX = torch.randn(1, 5, 3, 4, 4)
    together = convolution(x_BCTYX)
    assert not torch.allclose(together[:, :, 1:2], convolution(x_BCTYX[:, :, 1:2]))


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_encode_and_decode_change_sides_by_the_spatial_factor(frames: int) -> None:
    torch.manual_seed(0)
    vae = Vae(replace(SMALL, ffactor_temporal=frames)).eval()
    with torch.no_grad():
        mean, logvar = vae.encode_moments(torch.rand(2, 3, 16, 24) * 2 - 1)
        pixels = vae.decode(mean)
    assert mean.shape == logvar.shape == (2, 8, 4, 6)
    assert pixels.shape == (2, 3, 16, 24)


def test_space_to_depth_keeps_the_channel_fastest_and_is_undone() -> None:
    x_BCTYX = torch.arange(2 * 3 * 2 * 4 * 6).float().reshape(2, 3, 2, 4, 6)
    deep = _space_to_depth(x_BCTYX, 2)
    assert deep.shape == (2, 24, 1, 2, 3)
    # Channel order (t, y, x, c): the first three are the block's first cell in all channels.
    torch.testing.assert_close(deep[0, :3, 0, 0, 0], x_BCTYX[0, :, 0, 0, 0])
    torch.testing.assert_close(deep[0, 3:6, 0, 0, 0], x_BCTYX[0, :, 0, 0, 1])
    torch.testing.assert_close(deep[0, 12:15, 0, 0, 0], x_BCTYX[0, :, 1, 0, 0])
    torch.testing.assert_close(_depth_to_space(deep, 2), x_BCTYX)


def test_logvar_is_clamped_and_zero_noise_gives_the_scaled_mode() -> None:
    torch.manual_seed(0)
    vae = Vae(replace(SMALL, shift_factor=0.5)).eval()
    with torch.no_grad():
        assert vae.encoder.conv_out.bias is not None
        vae.encoder.conv_out.bias[8:] = 1000.0
        mean, logvar = vae.encode_moments(torch.zeros(1, 3, 8, 8))
    assert logvar.max() == 20.0
    mode = vae.posterior_sample(mean, logvar, torch.zeros_like(mean))
    torch.testing.assert_close(mode, (mean - 0.5) * SMALL.scaling_factor)


def test_the_released_network_has_its_parameter_count(
    released_shapes: dict[str, tuple[int, ...]],
) -> None:
    total = sum(torch.Size(shape).numel() for shape in released_shapes.values())
    assert total == 1_260_674_947


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.conv_in.weight", (128, 3, 3, 3, 3)),
        ("encoder.down.0.downsample.conv.weight", (64, 128, 3, 3, 3)),
        ("encoder.down.1.downsample.conv.weight", (128, 256, 3, 3, 3)),
        ("encoder.down.2.downsample.conv.weight", (128, 512, 3, 3, 3)),
        ("encoder.down.3.downsample.conv.weight", (128, 1024, 3, 3, 3)),
        ("encoder.down.4.block.1.conv2.weight", (1024, 1024, 3, 3, 3)),
        ("encoder.mid.block_1.norm1.weight", (1024,)),
        ("encoder.mid.attn_1.q.weight", (1024, 1024, 1, 1, 1)),
        ("encoder.mid.attn_1.proj_out.bias", (1024,)),
        ("encoder.norm_out.weight", (1024,)),
        ("encoder.conv_out.weight", (64, 1024, 3, 3, 3)),
        ("decoder.conv_in.weight", (1024, 32, 3, 3, 3)),
        ("decoder.up.0.block.2.conv1.weight", (1024, 1024, 3, 3, 3)),
        ("decoder.up.0.upsample.conv.weight", (8192, 1024, 3, 3, 3)),
        ("decoder.up.1.upsample.conv.weight", (4096, 1024, 3, 3, 3)),
        ("decoder.up.2.upsample.conv.weight", (1024, 512, 3, 3, 3)),
        ("decoder.up.3.upsample.conv.weight", (512, 256, 3, 3, 3)),
        ("decoder.up.4.block.0.norm2.bias", (128,)),
        ("decoder.conv_out.weight", (3, 128, 3, 3, 3)),
    ],
)
def test_the_released_network_has_the_official_names(
    released_shapes: dict[str, tuple[int, ...]], name: str, shape: tuple[int, ...]
) -> None:
    assert released_shapes[name] == shape


def test_no_block_of_the_released_network_needs_a_shortcut(
    released_shapes: dict[str, tuple[int, ...]],
) -> None:
    assert not [name for name in released_shapes if "nin_shortcut" in name]
    assert "decoder.up.4.upsample.conv.weight" not in released_shapes
    assert "encoder.down.4.downsample.conv.weight" not in released_shapes


@pytest.mark.parametrize("frames", [1, 4])
def test_its_weights_are_counted_without_its_files(frames: int) -> None:
    """They run in float32: 2.5 GB more than an index says, of 16 beside experts that wait."""
    vae = replace(RELEASED, ffactor_temporal=frames)
    with torch.device("meta"):
        whole = Vae(vae)
    halves = [sum(w.numel() for w in half.parameters()) for half in (whole.encoder, whole.decoder)]
    assert _vae_weights(vae) == pytest.approx(halves, rel=0.01)
