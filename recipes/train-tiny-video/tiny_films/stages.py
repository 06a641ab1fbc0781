"""The stages of a whole run; each one writes its result to the run's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_checkpoints import hunyuan_video15
from tiny_world.workers import rank, run_workers

from tiny_films.pool import draw_pool, read_pool
from tiny_films.prompts import PromptEncoder, drawn_bank
from tiny_films.sample import QuickRates
from tiny_films.train_decoder import DecoderRun, train_decoder
from tiny_films.train_flow import FlowRun, FlowTrainer, new_network
from tiny_films.train_vae import VaeRun, jointly_trained_vae, train_vae, trained_vae


@dataclass(frozen=True)
class WholeRun:
    """All training stages of one run; `films` and `wordings` are per scene."""

    vae: VaeRun
    decoder: DecoderRun
    flow: FlowRun
    workers: int
    films: int = 16
    wordings: int = 10

    @property
    def base(self) -> Path:
        """The untrained checkpoint, whose encoders and tokenizers the trained one keeps."""
        return self.vae.folder / "base"

    @property
    def pool(self) -> Path:
        return self.vae.folder / "pool.pt"


def base_stage(run: WholeRun) -> None:
    """Write the untrained checkpoint, every byte from its own seed."""
    if not (run.base / "model_index.json").exists():
        hunyuan_video15.write(run.base)


def vae_stage(run: WholeRun, tick: Callable[[], None]) -> None:
    """Train the autoencoder until its time is up; then draw and encode the films, once."""
    run_workers(run.workers, tick, train_vae, run.vae)
    if not run.pool.exists():
        draw_pool(
            jointly_trained_vae(run.vae.folder), run.pool, films=run.films, seed=run.flow.seed
        )


def decoder_stage(run: WholeRun, tick: Callable[[], None]) -> None:
    """Train the decoder with the finished encoder until its time is up."""
    run_workers(run.workers, tick, train_decoder, run.decoder)


def flow_stage(run: WholeRun, tick: Callable[[], None]) -> None:
    """Train the transformer until its time is up."""
    run_workers(run.workers, tick, _flow_worker, run)


def _flow_worker(run: WholeRun) -> None:
    pool, encoder = read_pool(run.pool), PromptEncoder(run.base)
    bank = drawn_bank(encoder, wordings=run.wordings, seed=run.flow.seed * 1000 + rank())
    vae = trained_vae(run.vae.folder)
    check = QuickRates(vae, encoder, pool.scaling_factor, run.flow.folder)
    torch.manual_seed(run.flow.seed)
    FlowTrainer(new_network(run.flow.seed), pool, bank, run.flow, check).train()
