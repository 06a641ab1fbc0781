"""The first stage: the library's own autoencoder on films drawn on the fly.

Single frames first, then short crops, then whole films: the same kernels, slower in each phase.

Shapes: B films · C channels · T frames · H W rows, columns · F Y X latent frames, rows, columns.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15RMS_norm
from tiny_checkpoints import hunyuan_video15
from tiny_world.ema import Ema
from tiny_world.muon import KernelMuon
from tiny_world.optimize import Optimizers, Rates
from tiny_world.run_state import RunState
from tiny_world.scenes import PICTURE_PX
from tiny_world.schedule import cosine_rate
from tiny_world.workers import rank
from torch import Tensor, nn

from tiny_films.draw import jitter, render
from tiny_films.loop import train
from tiny_films.world import FRAMES, trainable_scene

_CROP_SHIFT_PX = 14
_KL_WEIGHT = 5e-4
# A shape is a twelfth of its film: without this, its colour is learnt last.
_SHAPE_WEIGHT = 4.0
_RATES = Rates(muon=0.01, adam=1e-3)


@dataclass(frozen=True)
class Phase:
    """How films are cut, up to a fraction of the time; the batch is per worker."""

    until: float
    batch: int
    frames: int
    side_px: int


PHASES = (Phase(0.25, 20, 1, 32), Phase(0.55, 6, 5, 32), Phase(1.0, 2, FRAMES, PICTURE_PX))


@dataclass(frozen=True)
class VaeRun:
    """How long and how fast to train; `minutes` counts training time over all resumed runs."""

    minutes: float
    folder: Path
    rates: Rates = _RATES
    warm_up_steps: int = 30
    seed: int = 1
    max_steps: int | None = None


class VaeTrainer:
    """Network, optimisers and clock of the first stage, in one worker."""

    def __init__(self, run: VaeRun) -> None:
        torch.manual_seed(run.seed)
        self.run = run
        self.vae = new_vae()
        self.ema = Ema(self.vae, decay=0.995)
        self.optimizers = Optimizers(self.vae, run.rates, is_kernel, muon=KernelMuon)
        parts = {"vae": self.vae, "ema": self.ema, "optimizers": self.optimizers}
        self.state = RunState(run.folder, "vae", parts, device=torch.device("cpu"))

    def train(self) -> None:
        """Train until the time or the steps are used up; the result is the state file."""
        train(self.state, self._step, minutes=self.run.minutes, max_steps=self.run.max_steps)

    def _step(self, progress: float) -> dict[str, float]:
        rng = random.Random(f"{self.run.seed}/vae/{rank()}/{self.state.step}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        phase = next(p for p in PHASES if progress < p.until or p is PHASES[-1])
        film_BCTHW, weight_BCTHW = cut_films(phase, rng, generator)
        mean_BCFYX, logvar_BCFYX = moments(self.vae, film_BCTHW)
        noise_BCFYX = torch.randn(mean_BCFYX.shape, generator=generator)
        drawn_BCTHW = self.vae.decoder(mean_BCFYX + torch.exp(0.5 * logvar_BCFYX) * noise_BCFYX)
        loss, facts = vae_loss((drawn_BCTHW - film_BCTHW) * weight_BCTHW, mean_BCFYX, logvar_BCFYX)
        loss.backward()
        warm_up = self.run.warm_up_steps
        self.optimizers.step(cosine_rate(self.state.step, progress, warm_up_steps=warm_up))
        self.ema.update(self.vae)
        return facts | {"frames": float(phase.frames)}


def new_vae() -> Any:
    """Return the checkpoint's autoencoder as the library initialises it, able to take batches."""
    config = hunyuan_video15.arguments(hunyuan_video15.VAE)
    return accepting_batches(AutoencoderKLHunyuanVideo15(**config))


def accepting_batches(vae: Any) -> Any:
    """Return the same autoencoder for more than one film at a time.

    The library's causal mask of the middle block has no axis for the heads and fails for them. Its
    norm takes a fifth of a training step; written out, it takes a tenth of that.
    """
    for half in (vae.encoder, vae.decoder):
        for block in half.mid_block.attentions:
            block.prepare_causal_attention_mask = _causal_mask
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15RMS_norm):
            module.forward = partial(_normed, module)  # type: ignore[method-assign]
    return vae


def is_kernel(name: str, parameter: nn.Parameter) -> bool:
    """Return True for Muon's parameters: the convolutions between layers.

    Scales of norms have four axes.
    """
    return parameter.ndim == 5 and not name.startswith(("encoder.conv_in", "decoder.conv_out"))


def moments(vae: Any, film_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance of the posterior, [B, C, F, Y, X] each."""
    mean_BCFYX, logvar_BCFYX = vae.encoder(film_BCTHW).chunk(2, dim=1)
    return mean_BCFYX, logvar_BCFYX.clamp(-30, 20)


def vae_loss(
    error_BCTHW: Tensor, mean_BCFYX: Tensor, logvar_BCFYX: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return L1, squares, edges across and down, and a little of the KL divergence."""
    l1 = error_BCTHW.abs().mean()
    square = error_BCTHW.square().mean()
    edges = error_BCTHW.diff(dim=3).abs().mean() + error_BCTHW.diff(dim=4).abs().mean()
    kl = 0.5 * (mean_BCFYX.square() + logvar_BCFYX.exp() - 1 - logvar_BCFYX).mean()
    loss = l1 + 2 * square + 0.5 * edges + _KL_WEIGHT * kl
    return loss, {"l1": l1.item(), "square": square.item(), "kl": kl.item()}


def train_vae(run: VaeRun) -> None:
    """Run one worker's part of the first stage."""
    VaeTrainer(run).train()


def jointly_trained_vae(folder: Path) -> Any:
    """Return the smoothed autoencoder of a first stage; its encoder is finished."""
    vae = new_vae()
    ema = Ema(vae, decay=0.0)
    ema.load_state_dict(torch.load(folder / "vae_state.pt", weights_only=True)["ema"])
    ema.copy_to(vae)
    return vae.eval().requires_grad_(False)


def trained_vae(folder: Path) -> Any:
    """Return the same with the decoder that was trained after it."""
    vae, file = jointly_trained_vae(folder), folder / "decoder_state.pt"
    if file.exists():
        ema = Ema(vae.decoder, decay=0.0)
        ema.load_state_dict(torch.load(file, weights_only=True)["ema"])
        ema.copy_to(vae.decoder)
    return vae


def cut_films(
    phase: Phase, rng: random.Random, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a step's films, which depend only on the generators, and each pixel's weight."""
    scenes = [trainable_scene(rng) for _ in range(phase.batch)]
    first = rng.randint(0, FRAMES - phase.frames)
    stretch = slice(first, first + phase.frames)
    films_BCTHW = render(scenes, jitter(phase.batch, generator, is_tinted=True), stretch)
    background_BC111 = films_BCTHW[:, :, :1, :1, :1]
    is_shape_B1THW = (films_BCTHW - background_BC111).abs().amax(dim=1, keepdim=True) > 0.02
    weight_B1THW = 1 + (_SHAPE_WEIGHT - 1) * is_shape_B1THW
    cut = [_cut(pair, phase.side_px, rng) for pair in torch.cat([films_BCTHW, weight_B1THW], dim=1)]
    return torch.stack(cut).split([3, 1], dim=1)


def _cut(film_CTHW: Tensor, side: int, rng: random.Random) -> Tensor:
    """Return a window near the middle, which every shape crosses."""
    middle = (PICTURE_PX - side) // 2
    reach = min(middle, _CROP_SHIFT_PX)
    top, left = (middle + rng.randint(-reach, reach) for _ in range(2))
    return film_CTHW[:, :, top : top + side, left : left + side]


def _normed(norm: Any, x_BCTHW: Tensor) -> Tensor:
    """Compute HunyuanVideo15RMS_norm over channels in float32."""
    length_B1THW = x_BCTHW.square().sum(dim=1, keepdim=True).clamp(min=1e-24)
    scaled: Tensor = x_BCTHW * length_B1THW.rsqrt() * norm.scale * norm.gamma
    return scaled


def _causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int
) -> Tensor:
    """Return 0 for a cell's own and earlier frames, else minus infinity: [B, 1, S, S]."""
    frame_S = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    is_hidden_SS = frame_S[None, :] > frame_S[:, None]
    mask_SS = torch.zeros(is_hidden_SS.shape, dtype=dtype, device=device)
    return mask_SS.masked_fill(is_hidden_SS, float("-inf")).expand(batch_size, 1, -1, -1)
