"""The second stage: the transformer alone, by flow matching on the pool's latents. Resumable.

Shapes: B films · C channels · F Y X latent frames, rows, columns.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from tiny_checkpoints import hunyuan_video15
from tiny_world.ema import Ema
from tiny_world.muon import KernelMuon
from tiny_world.optimize import Optimizers, Rates
from tiny_world.run_state import RunState
from tiny_world.schedule import cosine_rate
from tiny_world.workers import rank
from torch import Tensor, nn

from tiny_films.forward import prepared, texts_of, velocity
from tiny_films.loop import train
from tiny_films.pool import FilmPool
from tiny_films.prompts import PromptBank

_RATES = Rates(muon=0.02, adam=2e-3)
_FROZEN = ("context_embedder_2.", "image_embedder.")

Check = Callable[[Any, int], dict[str, float]]


@dataclass(frozen=True)
class FlowRun:
    """How long and how fast to train; `minutes` counts training time over all resumed runs.

    The batch is per worker.
    """

    minutes: float
    folder: Path
    batch: int = 48
    rates: Rates = _RATES
    warm_up_steps: int = 60
    ema_decay: float = 0.997
    shift: float = 3.0
    check_every_s: float = 600.0
    seed: int = 2
    max_steps: int | None = None


class FlowTrainer:
    """Transformer, data, optimisers and clock of the second stage, in one worker."""

    def __init__(
        self,
        network: Any,
        pool: FilmPool,
        prompts: PromptBank,
        run: FlowRun,
        check: Check | None = None,
    ) -> None:
        self.network, self.pool, self.prompts = network, pool, prompts
        self.run, self.check = run, check
        self.glyph_width = int(network.config.text_embed_2_dim)
        self.ema = Ema(network, decay=run.ema_decay)
        self.optimizers = Optimizers(network, run.rates, is_matrix, muon=KernelMuon)
        parts = {"network": network, "ema": self.ema, "optimizers": self.optimizers}
        self.state = RunState(run.folder, "flow", parts, device=torch.device("cpu"))
        self.next_check_s = self.state.elapsed_s + run.check_every_s

    def train(self) -> None:
        """Train until the time or the steps are used up; the result is the state file."""
        train(
            self.state,
            self._step,
            minutes=self.run.minutes,
            max_steps=self.run.max_steps,
            behind=self._check_if_due,
        )

    def _step(self, progress: float) -> dict[str, float]:
        rng = random.Random(f"{self.run.seed}/flow/{rank()}/{self.state.step}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        index = [rng.randrange(len(self.pool.scenes)) for _ in range(self.run.batch)]
        clean_BCFYX = self.pool.sampled(torch.tensor(index), generator)
        texts = texts_of(
            [self.prompts.draw(rng, self.pool.scenes[number]) for number in index],
            self.glyph_width,
        )
        noise_BCFYX = torch.randn(clean_BCFYX.shape, generator=generator)
        sigma_B = random_sigmas(len(index), self.run.shift, generator)
        noisy_BCFYX = clean_BCFYX.lerp(noise_BCFYX, sigma_B[:, None, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            found_BCFYX = velocity(self.network, noisy_BCFYX, sigma_B, texts)
        flow = (found_BCFYX.float() - (noise_BCFYX - clean_BCFYX)).square().mean()
        flow.backward()
        factor = cosine_rate(self.state.step, progress, warm_up_steps=self.run.warm_up_steps)
        norm = self.optimizers.step(factor)
        self.ema.update(self.network)
        return {"flow": flow.item(), "norm": norm}

    def _check_if_due(self) -> None:
        if self.state.elapsed_s > self.next_check_s:
            self.next_check_s = self.state.elapsed_s + self.run.check_every_s
            self._check()

    def _check(self) -> None:
        """Measure the smoothed weights' rates on worker 0; the others wait at the next step."""
        if rank() != 0 or self.check is None:
            return
        kept = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.ema.copy_to(self.network)
        step = self.state.step
        self.state.note({"step": step} | self.check(self.network, step))
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(kept[name])


def new_network(seed: int) -> Any:
    """Return the transformer at the start: blocks that pass everything through, no velocity.

    Parts for pictures and quoted text stay random and frozen, and its file will contain them.
    """
    torch.manual_seed(seed)
    network: Any = HunyuanVideo15Transformer3DModel(
        **hunyuan_video15.arguments(hunyuan_video15.TRANSFORMER)
    )
    gates = [block.norm1.linear for block in network.transformer_blocks]
    gates += [block.norm1_context.linear for block in network.transformer_blocks]
    for layer in (*gates, network.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(_FROZEN))
        if name.startswith(_FROZEN):
            stored = parameter.detach().to(hunyuan_video15.transformer_dtype(name))
            parameter.data.copy_(stored)
    return prepared(network)


def trained_network(folder: Path, seed: int) -> Any:
    """Return the smoothed transformer of a second stage."""
    network = new_network(seed)
    ema = Ema(network, decay=0.0)
    ema.load_state_dict(torch.load(folder / "flow_state.pt", weights_only=True)["ema"])
    ema.copy_to(network)
    return network.eval().requires_grad_(False)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for Muon's parameters: weights between layers.

    Not the output or the table of kinds.
    """
    return parameter.ndim > 1 and not name.startswith(("proj_out", "cond_type_embed"))


def random_sigmas(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Return noise levels [B] in 0..1: half uniform, half as the scheduler's shift spaces them."""
    uniform_B = torch.rand(count, generator=generator)
    shifted_B = shift * uniform_B / (1 + (shift - 1) * uniform_B)
    return torch.where(torch.rand(count, generator=generator) < 0.5, uniform_B, shifted_B)
