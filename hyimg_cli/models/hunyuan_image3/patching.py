"""Latents to token rows and back: the UNet-style patch embed and final layer."""

# Legend: B row, C channel, Y X latent rows and columns, S image token, M model width
from torch import Tensor, nn
from torch.nn import functional as F

from hyimg_cli.models.hunyuan_image3.config import Architecture

_NORM_GROUPS = 32


class RowConv2d(nn.Conv2d):
    """A same-size convolution that can run as one matrix product over all cells of all pictures.

    A convolution kernel's bits depend on how many pictures it is given, a product's do not (see
    `kernels/rows.py`); for small grids on a CPU it is also the faster way.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=kernel // 2)
        self.by_rows = False

    def forward(self, x_BCYX: Tensor) -> Tensor:
        x_BCYX = x_BCYX.to(self.weight.dtype)
        if not self.by_rows:
            return super().forward(x_BCYX)
        kernel, padding = self.kernel_size[0], self.kernel_size[0] // 2
        windows_BLK = F.unfold(x_BCYX, kernel, padding=padding).transpose(1, 2)
        out_BLC = F.linear(windows_BLK, self.weight.flatten(1), self.bias)
        return out_BLC.transpose(1, 2).unflatten(2, x_BCYX.shape[2:])


class WideGroupNorm(nn.GroupNorm):
    """A group norm that gives float32 in any dtype, as under upstream's bfloat16 autocast.

    What follows, up to the next convolution, is then rounded to 16 bits once.
    """

    def forward(self, x_BCYX: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.group_norm(x_BCYX.float(), self.num_groups, weight, bias, self.eps)


class ResBlock(nn.Module):
    """Two 3x3 convolutions, the second scaled and shifted by the timestep."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, channels_in),
            nn.SiLU(),
            RowConv2d(channels_in, channels_out, 3),
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * channels_out))
        # Index 2 is upstream's dropout: it gives the convolution its stored name, out_layers.3.
        self.out_layers = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, channels_out),
            nn.SiLU(),
            nn.Identity(),
            RowConv2d(channels_out, channels_out, 3),
        )
        self.skip_connection = (
            nn.Identity()
            if channels_in == channels_out
            else RowConv2d(channels_in, channels_out, 1)
        )

    def forward(self, x_BCYX: Tensor, embedding_BM: Tensor) -> Tensor:
        h = self.in_layers(x_BCYX)
        scale, shift = self.emb_layers(embedding_BM)[..., None, None].chunk(2, dim=1)
        norm, activation, _, convolution = self.out_layers
        h = convolution(activation(norm(h) * (1 + scale) + shift))
        return self.skip_connection(x_BCYX) + h


class PatchEmbed(nn.Module):
    """Latents [B, C, Y, X] to image tokens [B, S, M], row by row."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        inner = arch.patch_embed_hidden_dim
        self.model = nn.ModuleList(
            [
                RowConv2d(arch.vae.latent_channels, inner, 3),
                ResBlock(inner, arch.hidden_size, arch.hidden_size),
            ]
        )

    def forward(self, latents_BCYX: Tensor, embedding_BM: Tensor) -> Tensor:
        convolution, block = self.model
        latents_BCYX = latents_BCYX.to(embedding_BM.dtype)
        return block(convolution(latents_BCYX), embedding_BM).flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Image tokens [B, S, M] of the residual stream to velocity [B, C, Y, X]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        inner = arch.patch_embed_hidden_dim
        head = nn.Sequential(
            WideGroupNorm(_NORM_GROUPS, inner),
            nn.SiLU(),
            RowConv2d(inner, arch.vae.latent_channels, 3),
        )
        self.model = nn.ModuleList([ResBlock(arch.hidden_size, inner, arch.hidden_size), head])

    def forward(self, tokens_BSM: Tensor, embedding_BM: Tensor, rows: int) -> Tensor:
        block, head = self.model
        x_BMYX = tokens_BSM.transpose(1, 2).unflatten(2, (rows, -1))
        return head(block(x_BMYX, embedding_BM))


class VisionAligner(nn.Module):
    """ViT features to model width: linear layers with exact GELU in between."""

    def __init__(self, width_in: int, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(width_in, width)]
        for _ in range(1, depth):
            layers += [nn.GELU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)
