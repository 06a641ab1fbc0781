"""The end of the first stage: the decoder alone, on whole films, with the encoder fixed.

From here on latents do not change their meaning, so the transformer can be trained at the same
time.

Shapes: B films · C channels · T frames · H W rows, columns · F Y X latent frames, rows, columns.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_world.ema import Ema
from tiny_world.muon import KernelMuon
from tiny_world.optimize import Optimizers, Rates
from tiny_world.run_state import RunState
from tiny_world.scenes import PICTURE_PX
from tiny_world.schedule import cosine_rate
from tiny_world.workers import rank

from tiny_films.loop import train
from tiny_films.train_vae import Phase, cut_films, is_kernel, jointly_trained_vae, moments, vae_loss
from tiny_films.world import FRAMES

# The denoise loop never ends at exactly a latent that the encoder would give.
_STRAY = 0.1
_RATES = Rates(muon=0.006, adam=6e-4)


@dataclass(frozen=True)
class DecoderRun:
    """How long and how fast to train; `minutes` counts training time over all resumed runs.

    The batch is per worker.
    """

    minutes: float
    folder: Path
    batch: int = 3
    rates: Rates = _RATES
    warm_up_steps: int = 20
    seed: int = 3
    max_steps: int | None = None


class DecoderTrainer:
    """The autoencoder with its encoder frozen, in one worker."""

    def __init__(self, run: DecoderRun) -> None:
        self.run = run
        self.vae = jointly_trained_vae(run.folder)
        self.decoder = self.vae.decoder.requires_grad_(True)
        self.ema = Ema(self.decoder, decay=0.99)
        self.optimizers = Optimizers(
            self.decoder,
            run.rates,
            lambda name, p: is_kernel(f"decoder.{name}", p),
            muon=KernelMuon,
        )
        parts = {"decoder": self.decoder, "ema": self.ema, "optimizers": self.optimizers}
        self.state = RunState(run.folder, "decoder", parts, device=torch.device("cpu"))

    def train(self) -> None:
        """Train until the time or the steps are used up; the result is the state file."""
        train(self.state, self._step, minutes=self.run.minutes, max_steps=self.run.max_steps)

    def _step(self, progress: float) -> dict[str, float]:
        rng = random.Random(f"{self.run.seed}/decoder/{rank()}/{self.state.step}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        phase = Phase(1.0, self.run.batch, FRAMES, PICTURE_PX)
        film_BCTHW, weight_B1THW = cut_films(phase, rng, generator)
        with torch.no_grad():
            mean_BCFYX, logvar_BCFYX = moments(self.vae, film_BCTHW)
            stray_BCFYX = torch.randn(mean_BCFYX.shape, generator=generator) * mean_BCFYX.std()
        drawn_BCTHW = self.decoder(mean_BCFYX + _STRAY * stray_BCFYX)
        error_BCTHW = (drawn_BCTHW - film_BCTHW) * weight_B1THW
        loss, facts = vae_loss(error_BCTHW, mean_BCFYX, logvar_BCFYX)
        loss.backward()
        warm_up = self.run.warm_up_steps
        self.optimizers.step(cosine_rate(self.state.step, progress, warm_up_steps=warm_up))
        self.ema.update(self.decoder)
        return {name: facts[name] for name in ("l1", "square")}


def train_decoder(run: DecoderRun) -> None:
    """Run one worker's part."""
    DecoderTrainer(run).train()
