"""The picture VAE: pixels in [-1, 1] to scaled latents and back, with official key names.

It knows convolutions only; callers fit pictures to a size and draw noise. Without gradients its
memory is bounded: two tensors of a level, one computed into the other by chunks of rows
(`row_chunks`). For that, levels and blocks reuse the memory of their inputs, which callers must not
read again.

Shapes: B batch · C channels · F latent frames · T frames · Y X rows, columns (pixels or latent
cells) · H W pixels.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyimg_cli.errors import UsageError
from hyimg_cli.models.hunyuan_image3.config import VaeArchitecture
from hyimg_cli.models.hunyuan_image3.row_chunks import RowChunks, plus
from hyimg_cli.spec.card import TileRule
from hyimg_cli.tiling.decode import TiledVae, decode_tiled

_NORM_GROUPS = 32
_NORM_EPS = 1e-6
_LOGVAR_RANGE = (-30.0, 20.0)


class Vae(nn.Module):
    """Encoder and decoder of one picture, with the scaling of the backbone's latents."""

    def __init__(self, architecture: VaeArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        self._shift = architecture.shift_factor or 0.0
        self.encoder = Encoder(architecture)
        self.decoder = Decoder(architecture)

    def encode_moments(self, pixels_BCYX: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and clamped log-variance of the posterior, each [B, C, Y, X], unscaled."""
        frames = self.architecture.ffactor_temporal
        moments_BCTYX = self.encoder(pixels_BCYX.unsqueeze(2).expand(-1, -1, frames, -1, -1))
        mean_BCYX, logvar_BCYX = moments_BCTYX.squeeze(2).chunk(2, dim=1)
        return mean_BCYX, logvar_BCYX.clamp(*_LOGVAR_RANGE)

    def posterior_sample(
        self, mean_BCYX: Tensor, logvar_BCYX: Tensor, noise_BCYX: Tensor
    ) -> Tensor:
        """Return scaled latents [B, C, Y, X], a posterior sample; zero noise gives the mode."""
        latents_BCYX = mean_BCYX + torch.exp(0.5 * logvar_BCYX) * noise_BCYX
        return (latents_BCYX - self._shift) * self.architecture.scaling_factor

    def decode(self, latents_BCYX: Tensor) -> Tensor:
        """Return pixels [B, 3, Y, X] of scaled latents, about [-1, 1], unclamped; last frame."""
        picture_BC1YX: Tensor = self.decoder(self.unscaled(latents_BCYX))
        return picture_BC1YX.squeeze(2)

    def unscaled(self, latents_BCYX: Tensor) -> Tensor:
        """Return latents in the decoder's own scale, [B, C, 1, Y, X]."""
        return (latents_BCYX / self.architecture.scaling_factor + self._shift).unsqueeze(2)


class TiledPicture(TiledVae):
    """The VAE decoding tile by tile, by the released rule; keeps the last frame.

    A tile is `sample_size` pixels and overlaps the next by a quarter: 24 latent cells every 18 for
    the released checkpoints. Memory is that of two rows of tiles; the mid block's attention sees
    one tile, so pixels differ from an untiled decode. Off by default, as in the released code.
    Source: `spatial_tiled_decode` of HunyuanImage-3's autoencoder.
    """

    tile_channels = 3

    def __init__(self, vae: Vae) -> None:
        self.vae = vae
        architecture = vae.architecture
        pixels, side = architecture.ffactor_spatial, architecture.sample_size
        # The released code would return a picture of another size without an error.
        if side % (4 * pixels):
            raise UsageError(
                f"a tile of {side} px is not a multiple of 4 latent cells of {pixels} px",
                where="VAE tiling",
                hint="remove --vae-use-tiling",
                code="usage.vae-tiling",
            )
        cells = side // pixels
        self.tiling = TileRule(cells, cells - cells // 4, pixels)

    def tile_frames(self, latent_frames: int) -> int:
        """Return 1, the frame of a picture."""
        return 1

    @torch.no_grad()
    def decode_tile(self, latents_BCFYX: Tensor) -> Tensor:
        """Return one tile, [B, C, 1, H, W]: its last frame. Always without gradients.

        With gradients, the VAE takes other chunks and more memory.
        """
        return self.vae.decoder(latents_BCFYX)

    def decode(self, latents_BCYX: Tensor) -> Tensor:
        """Return pixels like `Vae.decode`, tile by tile: [B, 3, H, W], about [-1, 1], unclamped."""
        return decode_tiled(self, self.vae.unscaled(latents_BCYX)).squeeze(2)


class Encoder(nn.Module):
    """Frames [B, 3, T, Y, X] to (mean | logvar) of the latents, T falling to 1."""

    def __init__(self, architecture: VaeArchitecture) -> None:
        super().__init__()
        widths = architecture.block_out_channels
        self.moments_width = 2 * architecture.latent_channels
        self.conv_in = FrameConv3d(architecture.in_channels, widths[0], 3)
        self.down = nn.ModuleList(_levels(architecture, is_up=False))
        self.mid = MidBlock(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = FrameConv3d(widths[-1], self.moments_width, 3)

    def forward(self, frames_BCTYX: Tensor) -> Tensor:
        h_BCTYX = self.conv_in.chunks(frames_BCTYX).joined(self.conv_in)
        for level in self.down:
            h_BCTYX = level(h_BCTYX)
        h_BCTYX = self.mid(h_BCTYX)
        shortcut_BCTYX = _mean_of_groups(h_BCTYX, self.moments_width)
        return _convolved(h_BCTYX, self.norm_out, self.conv_out, onto_BCTYX=shortcut_BCTYX)


class Decoder(nn.Module):
    """Unscaled latents [B, C, 1, Y, X] to a picture [B, 3, 1, Y, X], the last of T frames."""

    def __init__(self, architecture: VaeArchitecture) -> None:
        super().__init__()
        widths = architecture.block_out_channels[::-1]
        self.repeats = widths[0] // architecture.latent_channels
        self.conv_in = FrameConv3d(architecture.latent_channels, widths[0], 3)
        self.mid = MidBlock(widths[0])
        self.up = nn.ModuleList(_levels(architecture, is_up=True))
        self.norm_out = _norm(widths[-1])
        self.conv_out = FrameConv3d(widths[-1], architecture.out_channels, 3)

    def forward(self, latents_BCTYX: Tensor) -> Tensor:
        shortcut_BCTYX = latents_BCTYX.repeat_interleave(self.repeats, dim=1)
        h_BCTYX = self.mid(self.conv_in(latents_BCTYX) + shortcut_BCTYX)
        for level in self.up:
            h_BCTYX = level(h_BCTYX)
        chunks = RowChunks(h_BCTYX, 2 * self.conv_out.in_channels)
        swished = chunks.swished(self.norm_out)
        return chunks.joined(lambda chunk_BCTYX: self.conv_out.last_frame(swished(chunk_BCTYX)))


class Level(nn.Module):
    """Blocks at one width, then any step to the next level."""

    def __init__(self, width: int, blocks: int, step: Downsample | Upsample | None) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(width) for _ in range(blocks))
        self.downsample = step if isinstance(step, Downsample) else None
        self.upsample = step if isinstance(step, Upsample) else None

    def forward(self, h_BCTYX: Tensor) -> Tensor:
        for block in self.block:
            h_BCTYX = block(h_BCTYX)
        step = self.downsample or self.upsample
        return h_BCTYX if step is None else step(h_BCTYX)


class MidBlock(nn.Module):
    """Two residual blocks around one attention over all positions of all frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(width)
        self.attn_1 = SpatialAttention(width)
        self.block_2 = ResnetBlock(width)

    def forward(self, h_BCTYX: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(h_BCTYX)))


class ResnetBlock(nn.Module):
    """Norm, swish, convolution, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.conv1 = FrameConv3d(width, width, 3)
        self.norm2 = _norm(width)
        self.conv2 = FrameConv3d(width, width, 3)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        h_BCTYX = _convolved(x_BCTYX, self.norm1, self.conv1)
        return _convolved(h_BCTYX, self.norm2, self.conv2, onto_BCTYX=x_BCTYX)


class SpatialAttention(nn.Module):
    """One head over all T*Y*X positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q = FrameConv3d(width, width, 1)
        self.k = FrameConv3d(width, width, 1)
        self.v = FrameConv3d(width, width, 1)
        self.proj_out = FrameConv3d(width, width, 1)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        h_BCTYX = self.norm(x_BCTYX)
        q_BSC, k_BSC, v_BSC = (
            project(h_BCTYX).flatten(2).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed_BSC = functional.scaled_dot_product_attention(q_BSC, k_BSC, v_BSC)
        mixed_BCTYX = mixed_BSC.transpose(1, 2).reshape(x_BCTYX.shape)
        return x_BCTYX + self.proj_out(mixed_BCTYX)


class Downsample(nn.Module):
    """Convolution and space-to-depth, plus a shortcut that averages channel groups."""

    def __init__(self, width_in: int, width: int, frames: int) -> None:
        super().__init__()
        self.width, self.frames = width, frames
        self.conv = FrameConv3d(width_in, width // (4 * frames), 3)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        # The chunk in the shortcut's order, and four tensors made from it.
        return self.conv.chunks(x_BCTYX, tensors=4, halo=2).joined(self._chunk)

    def _chunk(self, x_BCTYX: Tensor) -> Tensor:
        shortcut_BCTYX = _mean_of_groups(_space_to_depth(x_BCTYX, self.frames), self.width)
        # In the convolution's memory: a mean always has channels first.
        return plus(_space_to_depth(self.conv(x_BCTYX), self.frames), shortcut_BCTYX)


class Upsample(nn.Module):
    """Convolution and depth-to-space, plus a shortcut that repeats channels."""

    def __init__(self, width_in: int, width: int, frames: int) -> None:
        super().__init__()
        self.frames = frames
        self.conv = FrameConv3d(width_in, width * 4 * frames, 3)
        self.repeats = width * 4 * frames // width_in

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        # The convolution's input, and its output in two orders.
        return self.conv.chunks(x_BCTYX, tensors=2).joined(self._chunk)

    def _chunk(self, x_BCTYX: Tensor) -> Tensor:
        deep_BCRTYX = self.conv(x_BCTYX).unflatten(1, (-1, self.repeats))
        deep_BCRTYX = plus(deep_BCRTYX, x_BCTYX.unsqueeze(2))
        return _depth_to_space(deep_BCRTYX.flatten(1, 2), self.frames)


class FrameConv3d(nn.Conv3d):
    """A zero-padded cubic convolution that runs as 2-D for a single frame.

    The outer temporal taps then meet only padding, so the centre tap is exact in mathematics, and
    several times faster on a CPU.
    """

    def __init__(self, width_in: int, width: int, kernel: int) -> None:
        super().__init__(width_in, width, kernel, padding=kernel // 2)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        if x_BCTYX.shape[2] > 1:
            return super().forward(x_BCTYX)
        past = self.kernel_size[0] // 2
        centre, x_BCYX = self.weight[:, :, past], x_BCTYX.squeeze(2)
        return functional.conv2d(x_BCYX, centre, self.bias, padding=past).unsqueeze(2)

    def chunks(self, x_BCTYX: Tensor, tensors: int = 1, halo: int = 1) -> RowChunks:
        """Return the rows of `x` to convolve.

        `tensors`: number of tensors, as large as the result, made from a chunk.
        """
        return RowChunks(x_BCTYX, self.in_channels + tensors * self.out_channels, halo=halo)

    def last_frame(self, x_BCTYX: Tensor) -> Tensor:
        """Return the last frame of `forward`'s result, where the last taps meet only padding."""
        if x_BCTYX.shape[2] == 1:
            return self.forward(x_BCTYX)
        past = self.kernel_size[0] // 2
        last_BCTYX, taps = x_BCTYX[:, :, -past - 1 :], self.weight[:, :, : past + 1]
        return functional.conv3d(last_BCTYX, taps, self.bias, padding=(0, past, past))


def _convolved(
    x_BCTYX: Tensor, norm: nn.GroupNorm, convolution: FrameConv3d, onto_BCTYX: Tensor | None = None
) -> Tensor:
    """Return norm, swish and convolution of `x`; added in place to any `onto`."""
    chunks = convolution.chunks(x_BCTYX)
    swished = chunks.swished(norm)
    return chunks.joined(lambda chunk_BCTYX: convolution(swished(chunk_BCTYX)), onto_BCTYX)


def _levels(architecture: VaeArchitecture, *, is_up: bool) -> list[Level]:
    """Return the encoder's levels from the finest on, or the decoder's up to the finest."""
    widths = architecture.block_out_channels[:: -1 if is_up else 1]
    steps, in_time = len(widths) - 1, int(math.log2(architecture.ffactor_temporal))
    # Between the coarsest levels, the number of frames changes too.
    halved = range(in_time) if is_up else range(steps - in_time, steps)
    kind, blocks = (Upsample, 1) if is_up else (Downsample, 0)
    blocks += architecture.layers_per_block
    pairs = enumerate(pairwise(widths))
    moves = [kind(*pair, frames=2 if i in halved else 1) for i, pair in pairs]
    return [Level(width, blocks, step) for width, step in zip(widths, (*moves, None), strict=True)]


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_NORM_GROUPS, width, eps=_NORM_EPS)


def _mean_of_groups(x_BCTYX: Tensor, width: int) -> Tensor:
    """Average consecutive channels until `width` are left."""
    return x_BCTYX.unflatten(1, (width, -1)).mean(2)


def _space_to_depth(x_BCTYX: Tensor, frames: int) -> Tensor:
    """Move blocks of frames x 2 x 2 cells into channels, in the order (t, y, x, c)."""
    batch, channels, time, rows, columns = x_BCTYX.shape
    split = x_BCTYX.reshape(batch, channels, time // frames, frames, rows // 2, 2, columns // 2, 2)
    shape = batch, frames * 4 * channels, time // frames, rows // 2, columns // 2
    return split.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(shape)


def _depth_to_space(x_BCTYX: Tensor, frames: int) -> Tensor:
    """The inverse of `_space_to_depth`."""
    batch, channels, time, rows, columns = x_BCTYX.shape
    split = x_BCTYX.reshape(batch, frames, 2, 2, channels // (frames * 4), time, rows, columns)
    shape = batch, channels // (frames * 4), time * frames, rows * 2, columns * 2
    return split.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(shape)
