"""Films of the second stage, drawn and encoded once, kept in one file of the run.

Shapes: N films · C channels · F Y X latent frames, rows, columns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_films.draw import jitter, render
from tiny_films.train_vae import moments
from tiny_films.world import TRAINABLE, Scene

_CHUNK = 24


@dataclass(frozen=True)
class FilmPool:
    """Posteriors of films, unscaled, and the factor that scales samples to a deviation of 1."""

    scenes: tuple[Scene, ...]
    mean_NCFYX: Tensor
    logvar_NCFYX: Tensor
    scaling_factor: float

    def sampled(self, index_B: Tensor, generator: torch.Generator) -> Tensor:
        """Return scaled latents of some films, drawn from their posteriors."""
        mean_BCFYX = self.mean_NCFYX[index_B]
        noise_BCFYX = torch.randn(mean_BCFYX.shape, generator=generator)
        spread_BCFYX = torch.exp(0.5 * self.logvar_NCFYX[index_B]) * noise_BCFYX
        return (mean_BCFYX + spread_BCFYX) * self.scaling_factor


@torch.no_grad()
def draw_pool(vae: Any, file: Path, *, films: int, seed: int) -> None:
    """Draw `films` of every scene that training may draw, in exact colours, into `file`."""
    generator = torch.Generator().manual_seed(seed)
    scenes = [scene for scene in TRAINABLE for _ in range(films)]
    means, logvars = [], []
    for start in range(0, len(scenes), _CHUNK):
        some = scenes[start : start + _CHUNK]
        mean, logvar = moments(vae, render(some, jitter(len(some), generator)))
        means.append(mean)
        logvars.append(logvar)
    mean, logvar = torch.cat(means), torch.cat(logvars)
    sample = mean + torch.exp(0.5 * logvar) * torch.randn(mean.shape, generator=generator)
    kept = {"mean": mean, "logvar": logvar, "scaling_factor": 1 / sample.std()}
    part = file.with_suffix(".part")
    torch.save(kept | {"films": torch.tensor(films)}, part)
    part.replace(file)


def read_pool(file: Path) -> FilmPool:
    """Return the pool that `draw_pool` wrote."""
    kept = torch.load(file, weights_only=True)
    scenes = tuple(scene for scene in TRAINABLE for _ in range(int(kept["films"])))
    return FilmPool(scenes, kept["mean"], kept["logvar"], float(kept["scaling_factor"]))
