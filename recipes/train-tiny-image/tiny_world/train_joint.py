"""The second stage: everything but the autoencoder, text and pictures together.

Flow matching on the generated picture's latents, cross-entropy on the text that the AR stage should
write, and a small loss for balanced experts. Resumable, with a time limit.

Shapes: B row · K copy · C Y X latents.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from tiny_world.batches import Row, RowBuilder, batch
from tiny_world.captions import random_wish, unknown_wish, worded_edit
from tiny_world.device import device_of, mixed
from tiny_world.ema import Ema
from tiny_world.free_words import free_edit, free_wish
from tiny_world.optimize import Optimizers, Rates
from tiny_world.pool import Moments, Pool, sampled
from tiny_world.run_state import RunState
from tiny_world.schedule import cosine_rate
from tiny_world.train_forward import Pictures, text_loss, train_forward
from tiny_world.workers import rank

_TEXT_WEIGHT = 0.4
_BALANCE_WEIGHT = 0.01
_UNKNOWN_SHARE = 0.03
_FREE_SHARE = 0.4
_RATES = Rates(muon=0.02, adam=3e-3)

Check = Callable[[HunyuanImage3ForCausalMM, int], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class JointRun:
    """How long and how fast to train; `minutes` counts training time over all resumed runs.

    Row counts are per worker: new pictures and edits, each with `copies` noisy pictures.
    """

    minutes: float
    folder: Path
    new_rows: int = 24
    edit_rows: int = 24
    copies: int = 3
    rates: Rates = _RATES
    warm_up_steps: int = 100
    ema_decay: float = 0.998
    check_every_s: float = 600.0
    seed: int = 4
    max_steps: int | None = None
    device: str = "cpu"


class JointTrainer:
    """Network, pool, optimisers and clock of the second stage, in one worker.

    It trains on the network's device.
    """

    def __init__(
        self,
        network: HunyuanImage3ForCausalMM,
        rows: RowBuilder,
        pool: Pool,
        run: JointRun,
        check: Check | None = None,
    ) -> None:
        self.network, self.rows, self.pool, self.run, self.check = network, rows, pool, run, check
        network.vae.requires_grad_(False)
        self.device = device_of(network)
        self.trained = nn.ModuleDict(
            {name: module for name, module in network.named_children() if name != "vae"}
        )
        self.ema = Ema(self.trained, decay=run.ema_decay)
        self.optimizers = Optimizers(self.trained, run.rates, is_matrix)
        self.notes: dict[str, list[float]] = {}
        parts = {"trained": self.trained, "ema": self.ema, "optimizers": self.optimizers}
        self.state = RunState(run.folder, "joint", parts, device=self.device)

    def train(self) -> None:
        """Train until the time is up; then the network has the smoothed weights."""
        budget_s, state = self.run.minutes * 60, self.state
        next_check_s = state.elapsed_s + min(120.0, self.run.check_every_s)
        while state.elapsed_s < budget_s and state.step != self.run.max_steps:
            with state.timed_step():
                self._step(state.elapsed_s / budget_s)
            if state.is_log_due:
                self._log()
            state.save_if_due()
            if state.elapsed_s > next_check_s:
                next_check_s = state.elapsed_s + self.run.check_every_s
                self._check()
        if self.notes:
            self._log()
        state.save()
        self.ema.copy_to(self.trained)

    def _step(self, progress: float) -> None:
        seed = f"{self.run.seed}/joint/{rank()}/{self.state.step}"
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        for is_edit in (False, True):
            loss, facts = self._loss(rng, generator, is_edit=is_edit)
            (loss / 2).backward()
            kind = "edit" if is_edit else "new"
            for name, value in facts.items():
                self._note(f"{kind}_{name}", value)
        factor = cosine_rate(self.state.step, progress, warm_up_steps=self.run.warm_up_steps)
        self._note("norm", self.optimizers.step(factor))
        self.ema.update(self.trained)

    def _loss(
        self, rng: random.Random, generator: torch.Generator, *, is_edit: bool
    ) -> tuple[Tensor, dict[str, float]]:
        rows, latents_BCYX, pictures = self._data(rng, generator, is_edit=is_edit)
        noise_BKCYX = torch.randn(pictures.noisy_BKCYX.shape, generator=generator)
        sigma_BK = random_sigmas(len(rows), self.run.copies, generator)
        clean_BKCYX = latents_BCYX[:, None].expand_as(noise_BKCYX)
        noisy_BKCYX = clean_BKCYX.lerp(noise_BKCYX, sigma_BK[..., None, None, None])
        pictures = dataclasses.replace(
            pictures, noisy_BKCYX=noisy_BKCYX, timesteps_BK=1000 * sigma_BK
        )
        padded = batch(rows, self.rows.vocabulary, copies=self.run.copies)
        with mixed(self.device):
            outputs = train_forward(self.network, padded, pictures)
            text = text_loss(self.network, outputs, padded)
        towards_BKCYX = (noise_BKCYX - clean_BKCYX).to(self.device)
        flow = (outputs.velocity_BKCYX - towards_BKCYX).square().mean()
        loss = flow + _TEXT_WEIGHT * text + _BALANCE_WEIGHT * outputs.balance
        facts = {"flow": flow.item(), "text": text.item(), "balance": outputs.balance.item()}
        return loss, facts

    def _data(
        self, rng: random.Random, generator: torch.Generator, *, is_edit: bool
    ) -> tuple[list[Row], Tensor, Pictures]:
        """Return rows, clean latents [B, C, Y, X], and the pictures without noise."""
        count = self.run.edit_rows if is_edit else self.run.new_rows
        start = 0 if is_edit else self.pool.clean_from
        index = [rng.randrange(start, len(self.pool.edits)) for _ in range(count)]
        index_B = torch.tensor(index)
        if is_edit:
            rows = [self._edit_row(i, rng) for i in index]
            latents_BCYX = self._sampled(self.pool.targets, index_B, generator)
            source_BCYX: Tensor | None = self._sampled(self.pool.sources, index_B, generator)
            pixels_BCYX: Tensor | None = self.pool.source_pixels_BCYX[index_B]
        else:
            is_target = rng.random() < 0.5
            rows = [self._new_row(i, rng, is_target=is_target) for i in index]
            moments = self.pool.targets if is_target else self.pool.sources
            latents_BCYX = self._sampled(moments, index_B, generator)
            source_BCYX = pixels_BCYX = None
        empty_BKCYX = latents_BCYX[:, None].expand(-1, self.run.copies, -1, -1, -1)
        pictures = Pictures(empty_BKCYX, torch.zeros(count, 0), source_BCYX, pixels_BCYX)
        return rows, latents_BCYX, pictures

    def _sampled(self, moments: Moments, index_B: Tensor, generator: torch.Generator) -> Tensor:
        return sampled(self.network.vae, moments, index_B, generator)

    def _edit_row(self, index: int, rng: random.Random) -> Row:
        edit = self.pool.edits[index]
        if rng.random() < _FREE_SHARE:
            return self.rows.random_row(free_edit(rng, edit), rng)
        return self.rows.random_row(worded_edit(rng, edit.source, edit.target, edit.facts), rng)

    def _new_row(self, index: int, rng: random.Random, *, is_target: bool) -> Row:
        edit = self.pool.edits[index]
        scene = edit.target if is_target else edit.source
        wordings = (unknown_wish, free_wish, random_wish)
        shares = (_UNKNOWN_SHARE, _FREE_SHARE, 1 - _UNKNOWN_SHARE - _FREE_SHARE)
        worded = rng.choices(wordings, shares)[0]
        return self.rows.random_row(worded(rng, scene), rng)

    def _check(self) -> None:
        """Measure the smoothed weights' rates on worker 0; the others wait at the next step."""
        if rank() != 0 or self.check is None:
            return
        kept = {name: p.detach().clone() for name, p in self.trained.named_parameters()}
        self.ema.copy_to(self.trained)
        step = self.state.step
        self.state.note({"step": step} | self.check(self.network, step))
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                parameter.copy_(kept[name])

    def _note(self, name: str, value: float) -> None:
        self.notes.setdefault(name, []).append(value)

    def _log(self) -> None:
        """Log one line of means since the last one."""
        self.state.log({name: round(sum(v) / len(v), 4) for name, v in self.notes.items()})
        self.notes = {}


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for Muon's parameters: kernels and weights between layers.

    Not tables, heads or the router.
    """
    tables = ("wte", "lm_head", "gate.wg", "position_embedding")
    return parameter.ndim > 1 and not any(table in name for table in tables)


def random_sigmas(rows: int, copies: int, generator: torch.Generator) -> Tensor:
    """Return noise levels [B, K] in 0..1: half uniform, half logit-normal around 0.57."""
    shape = (rows, copies)
    uniform_BK = torch.rand(shape, generator=generator)
    normal_BK = torch.sigmoid(torch.randn(shape, generator=generator) + 0.3)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, uniform_BK, normal_BK)
