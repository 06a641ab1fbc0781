"""Pictures of the joint stage, drawn and encoded once: pairs of a source and its edit.

Shapes: B picture · C channels · Y X rows, columns (pixels or latent cells).
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hyimg_cli.models.hunyuan_image3.vae import Vae
from tiny_world.captions import Edit, random_edit
from tiny_world.device import device_of, mixed
from tiny_world.draw import Jitter, jitter, render, to_unit
from tiny_world.heldout import is_held_out, trainable_scene
from tiny_world.scenes import Scene

_CHUNK = 64
# Users' sources never have exactly our colours: this share is slightly off.
_TINTED_SHARE = 0.4


class Moments(NamedTuple):
    """The posterior of encoded pictures, each [B, C, Y, X], unscaled."""

    mean_BCYX: Tensor
    logvar_BCYX: Tensor


@dataclass(frozen=True)
class Pool:
    """Pairs; those from `clean_from` on have exact colours and also serve as new pictures."""

    edits: tuple[Edit, ...]
    clean_from: int
    source_pixels_BCYX: Tensor
    sources: Moments
    targets: Moments

    @property
    def scenes(self) -> frozenset[Scene]:
        """Return every scene that training has seen."""
        return frozenset(s for edit in self.edits for s in (edit.source, edit.target))


def drawn_pool(vae: Vae, *, pairs: int, seed: int) -> Pool:
    """Draw and encode `pairs` random edits, none of a held-out scene."""
    rng = random.Random(f"{seed}/pool")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    edits = tuple(trainable_edit(rng) for _ in range(pairs))
    clean_from = int(pairs * _TINTED_SHARE)
    tinted = jitter(clean_from, generator, tinted=True)
    clean = jitter(pairs - clean_from, generator)
    shared = _joined(tinted, clean)
    sources_BCYX = render([edit.source for edit in edits], shared)
    targets_BCYX = render([edit.target for edit in edits], shared)
    return Pool(
        edits, clean_from, sources_BCYX, encoded(vae, sources_BCYX), encoded(vae, targets_BCYX)
    )


def trainable_edit(rng: random.Random) -> Edit:
    """Return a random edit between scenes that training may draw."""
    while is_held_out((edit := random_edit(rng, trainable_scene(rng))).target):
        pass
    return edit


@torch.no_grad()
def encoded(vae: Vae, pixels_BCYX: Tensor) -> Moments:
    """Return moments of uint8 pictures, computed on the autoencoder's device, kept on the CPU."""
    parts, device = [], device_of(vae)
    for chunk in pixels_BCYX.split(_CHUNK):
        with mixed(device):
            parts.append(vae.encode_moments(to_unit(chunk.to(device))))
    means, logvars = zip(*parts, strict=True)
    return Moments(torch.cat(means).float().cpu(), torch.cat(logvars).float().cpu())


def sampled(vae: Vae, moments: Moments, index_B: Tensor, generator: torch.Generator) -> Tensor:
    """Return scaled latents of some pictures, drawn from their posteriors."""
    mean_BCYX = moments.mean_BCYX[index_B]
    noise_BCYX = torch.randn(mean_BCYX.shape, generator=generator)
    return vae.posterior_sample(mean_BCYX, moments.logvar_BCYX[index_B], noise_BCYX)


def _joined(first: Jitter, second: Jitter) -> Jitter:
    return Jitter(
        torch.cat([first.shift_B2, second.shift_B2]),
        torch.cat([first.scale_B, second.scale_B]),
        torch.cat([first.tint_BC, second.tint_BC]),
    )
