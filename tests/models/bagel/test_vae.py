"""diffusers' autoencoder under the checkpoint's names, against one written out in plain torch."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyimg_cli.models.bagel.config import model_card
from hyimg_cli.models.bagel.family import Bagel
from hyimg_cli.models.bagel.weights import autoencoder, stored_name

LEVELS, BLOCKS = 4, 2


class Written:
    """The layout's formulas: residual blocks by level, one attention in the middle."""

    def __init__(self, folder: Path) -> None:
        self.w = {n: v.float() for n, v in load_file(folder / "ae.safetensors").items()}

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int | None = None) -> Tensor:
        weight = self.w[f"{name}.weight"]
        own = weight.shape[-1] // 2 if padding is None else padding
        return F.conv2d(x, weight, self.w[f"{name}.bias"], stride=stride, padding=own)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 32, self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps=1e-6)

    def block(self, x: Tensor, name: str) -> Tensor:
        h = self.conv(F.silu(self.norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self.conv(F.silu(self.norm(h, f"{name}.norm2")), f"{name}.conv2")
        has_other_width = f"{name}.nin_shortcut.weight" in self.w
        return h + (self.conv(x, f"{name}.nin_shortcut") if has_other_width else x)

    def middle(self, x: Tensor, side: str) -> Tensor:
        x = self.block(x, f"{side}.mid.block_1")
        name = f"{side}.mid.attn_1"
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{n}").flatten(2).transpose(1, 2) for n in "qkv")
        seen = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v
        x = x + self.conv(seen.transpose(1, 2).view(x.shape), f"{name}.proj_out")
        return self.block(x, f"{side}.mid.block_2")

    def moments(self, x: Tensor) -> Tensor:
        x = self.conv(x, "encoder.conv_in")
        for level in range(LEVELS):
            for number in range(BLOCKS):
                x = self.block(x, f"encoder.down.{level}.block.{number}")
            if level < LEVELS - 1:
                name = f"encoder.down.{level}.downsample.conv"
                x = self.conv(F.pad(x, (0, 1, 0, 1)), name, stride=2, padding=0)
        x = self.middle(x, "encoder")
        return self.conv(F.silu(self.norm(x, "encoder.norm_out")), "encoder.conv_out")

    def decoded(self, z: Tensor) -> Tensor:
        x = self.middle(self.conv(z, "decoder.conv_in"), "decoder")
        for level in reversed(range(LEVELS)):
            for number in range(BLOCKS + 1):
                x = self.block(x, f"decoder.up.{level}.block.{number}")
            if level:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = self.conv(x, f"decoder.up.{level}.upsample.conv")
        return self.conv(F.silu(self.norm(x, "decoder.norm_out")), "decoder.conv_out")


@pytest.fixture(scope="module")
def written(bagel_folder: Path) -> Written:
    return Written(bagel_folder)


@torch.no_grad()
def test_a_round_trip(bagel: Bagel, written: Written) -> None:
    generator = torch.Generator().manual_seed(3)
    levels = torch.rand(3, 32, 48, generator=generator) * 2 - 1
    noise = torch.randn(16, 4, 6, generator=generator)
    mean, logvar = written.moments(levels[None])[0].chunk(2)
    expected = 0.3611 * (mean + (0.5 * logvar).exp() * noise - 0.1159)
    found = bagel.codec.encode(levels, noise)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    pixels = written.decoded(found[None] / 0.3611 + 0.1159)[0]
    torch.testing.assert_close(bagel.codec.decode(found), pixels, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_log_variance_is_not_clamped(bagel: Bagel, monkeypatch: Any) -> None:
    class Encoder:
        conv_in = bagel.codec.vae.encoder.conv_in

        def __call__(self, x: Tensor) -> Tensor:
            return torch.cat([torch.zeros(1, 16, 1, 1), torch.full((1, 16, 1, 1), -80.0)], dim=1)

    monkeypatch.setattr(bagel.codec, "vae", _With(bagel.codec.vae, Encoder()))
    found = bagel.codec.encode(torch.zeros(3, 8, 8), torch.full((16, 1, 1), 1e15))
    torch.testing.assert_close(
        found, torch.full((16, 1, 1), 0.3611 * (1e15 * 2**-57.7078 - 0.1159))
    )


class _With:
    def __init__(self, vae: Any, encoder: Any) -> None:
        self.config, self.encoder = vae.config, encoder


def test_the_released_layout(bagel: Bagel) -> None:
    """244 names in the released widths, as many as its file has; no two of them are one."""
    from hyimg_cli.models.bagel.config import AutoencoderShape

    with torch.device("meta"):
        names = autoencoder(AutoencoderShape()).state_dict()
    stored = {stored_name(name, LEVELS) for name in names}
    assert len(stored) == len(names) == 244
    assert "encoder.down.1.block.0.nin_shortcut.weight" in stored
    assert "decoder.up.3.upsample.conv.weight" in stored
    assert "decoder.mid.attn_1.proj_out.bias" in stored


class _Live(TorchDispatchMode):
    """Follows the bytes of all storages that are alive, which torch made within it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._known.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._known.values()))
        return made


@torch.no_grad()
@pytest.mark.parametrize("does", ["decode", "encode"])
def test_the_card_has_the_bytes_of_a_pixel_at_the_peak(bagel: Bagel, does: str) -> None:
    """Of the released widths, counted on the meta device."""
    from hyimg_cli.models.bagel.config import AutoencoderShape

    shape, side = AutoencoderShape(), 1024
    arch = replace(bagel.prompter.arch, vae=shape)
    card = model_card(bagel.prompter.folder, "x", arch)
    with torch.device("meta"):
        vae = autoencoder(shape)
        channels, rows = (shape.z_channels, side // 8) if does == "decode" else (3, side)
        given = torch.empty(1, channels, rows, rows)
        with _Live() as live:
            getattr(vae, does)(given)
    per_pixel = live.peak / side**2
    assert per_pixel <= card.vae_bytes_per_pixel
    assert does == "encode" or per_pixel > 0.98 * card.vae_bytes_per_pixel


@torch.no_grad()
def test_tiles_change_little(bagel: Bagel) -> None:
    latents = torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(1))
    whole = bagel.codec.decode(latents)
    bagel.codec.vae.use_tiling = True
    # Smaller than a tile: the same.
    assert torch.equal(bagel.codec.decode(latents), whole)
    bagel.codec.vae.use_tiling = False
