"""The first stage: the autoencoder, alone, on pictures drawn on the fly.

Crops first (a quarter of the cost, and mostly edges), then whole pictures. Resumable.

Shapes: B batch · C channels · Y X rows, columns.
"""

import dataclasses
import json
import random
from pathlib import Path

import torch
from torch import Tensor

from hyimg_cli.models.hunyuan_image3.config import VaeArchitecture
from hyimg_cli.models.hunyuan_image3.vae import Vae
from tiny_world.device import mixed, worker_device
from tiny_world.draw import jitter, render, to_unit
from tiny_world.ema import Ema
from tiny_world.heldout import trainable_scene
from tiny_world.optimize import Optimizers, Rates
from tiny_world.run_state import RunState
from tiny_world.scenes import PICTURE_PX, PLACES, Scene
from tiny_world.schedule import cosine_rate
from tiny_world.workers import rank

_CROP_PX = 32
_CROP_SHIFT_PX = 12
_CROP_SHARE = 0.45
_KL_WEIGHT = 5e-4
_RATES = Rates(muon=0.025, adam=1e-3)


@dataclasses.dataclass(frozen=True)
class VaeRun:
    """How long and how fast to train; `minutes` counts training time over all resumed runs.

    Batches are per worker.
    """

    minutes: float
    folder: Path
    batch: int = 6
    crop_batch: int = 14
    rates: Rates = _RATES
    warm_up_steps: int = 30
    seed: int = 1
    max_steps: int | None = None
    device: str = "cpu"


class VaeTrainer:
    """Model, optimisers and clock of the first stage, in one worker."""

    def __init__(self, architecture: VaeArchitecture, run: VaeRun) -> None:
        torch.manual_seed(run.seed)
        self.run = run
        self.device = worker_device(run.device)
        self.vae = Vae(architecture).to(self.device)
        self.ema = Ema(self.vae, decay=0.995)
        self.optimizers = Optimizers(self.vae, run.rates, lambda _, p: p.ndim > 1)
        parts = {"vae": self.vae, "ema": self.ema, "optimizers": self.optimizers}
        self.state = RunState(run.folder, "vae", parts, device=self.device)
        # Weights start equal in every worker; the drawn pictures must differ.
        torch.manual_seed(run.seed + 1000 * self.state.step + rank())

    def train(self) -> Vae:
        """Train until the time is up; return the smoothed autoencoder, its scaling not measured
        yet.
        """
        budget_s, state = self.run.minutes * 60, self.state
        facts: dict[str, float] = {}
        while state.elapsed_s < budget_s and state.step != self.run.max_steps:
            with state.timed_step():
                facts = self._step(state.elapsed_s / budget_s)
            if state.is_log_due:
                state.log(facts)
            state.save_if_due()
        if facts:
            state.log(facts)
            state.save()
        self.ema.copy_to(self.vae)
        return self.vae

    def _step(self, progress: float) -> dict[str, float]:
        pixels_BCYX = self._batch(is_crop=progress < _CROP_SHARE).to(self.device)
        with mixed(self.device):
            mean_BCYX, logvar_BCYX = self.vae.encode_moments(pixels_BCYX)
            noise_BCYX = torch.randn_like(mean_BCYX)
            latents_BCYX = self.vae.posterior_sample(mean_BCYX, logvar_BCYX, noise_BCYX)
            drawn_BCYX = self.vae.decode(latents_BCYX).float()
        loss, facts = vae_loss(drawn_BCYX, pixels_BCYX, mean_BCYX.float(), logvar_BCYX.float())
        loss.backward()
        warm_up = self.run.warm_up_steps
        self.optimizers.step(cosine_rate(self.state.step, progress, warm_up_steps=warm_up))
        self.ema.update(self.vae)
        return facts

    def _batch(self, *, is_crop: bool) -> Tensor:
        """Return the pictures of this step; depends only on the seed, the worker and the step."""
        rng = random.Random(f"{self.run.seed}/vae/{rank()}/{self.state.step}")
        count = self.run.crop_batch if is_crop else self.run.batch
        scenes = [trainable_scene(rng) for _ in range(count)]
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        pixels_BCYX = render(scenes, jitter(count, generator, tinted=True))
        if is_crop:
            pairs = zip(pixels_BCYX, scenes, strict=True)
            pixels_BCYX = torch.stack([_crop(picture, scene, rng) for picture, scene in pairs])
        return to_unit(pixels_BCYX)


def vae_loss(
    drawn_BCYX: Tensor, pixels_BCYX: Tensor, mean_BCYX: Tensor, logvar_BCYX: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return L1 + 0.5 gradient difference + 2 MSE + a little KL, and the parts for the log."""
    error_BCYX = drawn_BCYX - pixels_BCYX
    l1, mse = error_BCYX.abs().mean(), error_BCYX.square().mean()
    gradient = error_BCYX.diff(dim=2).abs().mean() + error_BCYX.diff(dim=3).abs().mean()
    kl = 0.5 * (mean_BCYX.square() + logvar_BCYX.exp() - 1 - logvar_BCYX).mean()
    loss = l1 + 0.5 * gradient + 2 * mse + _KL_WEIGHT * kl
    facts = {"loss": loss.item(), "l1": l1.item(), "mse": mse.item(), "kl": kl.item()}
    return loss, facts


@torch.no_grad()
def measured_scaling_factor(vae: Vae, *, pictures: int = 256, seed: int = 2) -> float:
    """Return 1 / the standard deviation of unscaled posterior samples."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(0, pictures, 64):
        pixels_BCYX = render([trainable_scene(rng) for _ in range(64)], jitter(64, generator))
        mean_BCYX, logvar_BCYX = vae.encode_moments(to_unit(pixels_BCYX))
        noise_BCYX = torch.randn(mean_BCYX.shape, generator=generator)
        samples.append(mean_BCYX + torch.exp(0.5 * logvar_BCYX) * noise_BCYX)
    return 1 / torch.cat(samples).std().item()


def _crop(picture_CYX: Tensor, scene: Scene, rng: random.Random) -> Tensor:
    """Return a window near the shape: in a flat one, the group norms have nothing to measure."""
    top, left = (
        int(PICTURE_PX / 2 + offset - _CROP_PX / 2) + rng.randint(-_CROP_SHIFT_PX, _CROP_SHIFT_PX)
        for offset in PLACES[scene.place]
    )
    top, left = (min(max(edge, 0), PICTURE_PX - _CROP_PX) for edge in (top, left))
    return picture_CYX[:, top : top + _CROP_PX, left : left + _CROP_PX]


def train_vae(architecture: VaeArchitecture, run: VaeRun) -> None:
    """Run one worker's part of the first stage; the result is the state file."""
    VaeTrainer(architecture, run).train()


def trained_vae(architecture: VaeArchitecture, folder: Path) -> Vae:
    """Return the smoothed autoencoder of a finished stage, with its scaling measured once."""
    vae = Vae(architecture)
    ema = Ema(vae, decay=0.0)
    state = torch.load(folder / "vae_state.pt", weights_only=True, map_location="cpu")
    ema.load_state_dict(state["ema"])
    ema.copy_to(vae)
    measured = folder / "vae_scaling.json"
    if not measured.exists():
        measured.write_text(json.dumps(measured_scaling_factor(vae)), encoding="utf-8")
    factor = json.loads(measured.read_text(encoding="utf-8"))
    vae.architecture = dataclasses.replace(architecture, scaling_factor=factor)
    return vae.eval()
