"""Draw many films of a network in training at once, and count the right ones.

Shapes: B films · T frames · C channels · H W rows, columns · F Y X latent frames, rows, columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hyimg_cli.models.latent import PromptEmbedding
from tiny_films.captions import plain_prompt
from tiny_films.draw import to_bytes
from tiny_films.forward import texts_of, velocity
from tiny_films.judge import judge
from tiny_films.prompts import PromptEncoder
from tiny_films.world import FACTS, HELD_OUT, TRAINABLE, Scene

LATENT_GRID = (3, 4, 4)


@dataclass(frozen=True)
class Sampling:
    """The checkpoint's own defaults."""

    steps: int = 12
    guidance: float = 2.0
    shift: float = 3.0


@torch.no_grad()
def drawn(
    network: Any,
    vae: Any,
    prompts: Sequence[PromptEmbedding],
    empty: PromptEmbedding,
    scaling_factor: float,
    sampling: Sampling,
) -> Tensor:
    """Return films uint8 [B, T, 3, H, W], each from its own seed: its place in the list."""
    width = int(network.config.text_embed_2_dim)
    texts, nothing = texts_of(prompts, width), texts_of([empty] * len(prompts), width)
    shape = (int(network.config.out_channels), *LATENT_GRID)
    latents_BCFYX = torch.stack(
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            for seed in range(len(prompts))
        ]
    )
    levels = torch.linspace(1, 0, sampling.steps + 1)
    sigmas = (sampling.shift * levels / (1 + (sampling.shift - 1) * levels)).tolist()
    for now, after in pairwise(sigmas):
        sigma_B = torch.full((len(prompts),), now)
        wanted, free = (velocity(network, latents_BCFYX, sigma_B, t) for t in (texts, nothing))
        latents_BCFYX = latents_BCFYX + (after - now) * (free + sampling.guidance * (wanted - free))
    films = [vae.decoder(part / scaling_factor) for part in latents_BCFYX.split(8)]
    return torch.stack([to_bytes(film) for film in torch.cat(films)])


class QuickRates:
    """Checks a run: held-out and trained scenes in the plainest words."""

    def __init__(self, vae: Any, encoder: PromptEncoder, scaling_factor: float, folder: Path):
        self._vae, self._encoder = vae, encoder
        self._scaling_factor, self._folder = scaling_factor, folder

    def __call__(
        self, network: Any, step: int, sampling: Sampling = Sampling()
    ) -> dict[str, float]:
        """Return the shares of right films, and write a contact sheet.

        A film a row, its frames side by side.
        """
        network.eval()
        kinds = {"held_out": HELD_OUT, "seen": TRAINABLE[::4]}
        rates: dict[str, float] = {}
        sheets = []
        for kind, scenes in kinds.items():
            films = self.films(network, scenes, sampling)
            sheets.append(films)
            wrong = [judge(f).wrong(s) for f, s in zip(films, scenes, strict=True)]
            rates[f"{kind}_right"] = _share([not facts for facts in wrong])
            for fact in FACTS:
                rates[f"{kind}_{fact}"] = _share([fact not in facts for facts in wrong])
        write_sheet(torch.cat(sheets), self._folder / f"samples_{step:06d}.png")
        network.train()
        return rates

    def films(self, network: Any, scenes: Sequence[Scene], sampling: Sampling) -> Tensor:
        """Return films of scenes in the plainest words."""
        prompts = [self._encoder.encode(plain_prompt(scene)) for scene in scenes]
        empty = self._encoder.encode("")
        return drawn(network, self._vae, prompts, empty, self._scaling_factor, sampling)


def write_sheet(films_BTCHW: Tensor, file: Path, *, columns: int = 3) -> None:
    """Write a contact sheet: `columns` films a row, every other frame side by side."""
    shown = films_BTCHW[:, ::2]
    missing = -len(shown) % columns
    blank = shown.new_full((missing, *shown.shape[1:]), 128)
    strips = torch.cat([shown, blank]).permute(0, 3, 1, 4, 2).flatten(2, 3)
    gap = strips.new_full((*strips.shape[:2], 6, 3), 128)
    rows = torch.cat([strips, gap], dim=2).unflatten(0, (-1, columns))
    Image.fromarray(rows.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2).numpy()).save(
        file, optimize=True
    )


def _share(truths: Sequence[bool]) -> float:
    return round(sum(truths) / len(truths), 4)
