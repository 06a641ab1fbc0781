"""Draw and read batches with the training forward, for quick rates during a run.

The text is given (as it should have been written); in `evaluate.py` the product writes its own.

Shapes: B row · C Y X latents or pixels · N picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from tiny_world.architecture import LATENT_GRID
from tiny_world.batches import Batch, RowBuilder, Written, batch
from tiny_world.captions import Edit, Wish
from tiny_world.device import device_of, mixed
from tiny_world.draw import no_jitter, render, to_bytes
from tiny_world.heldout import held_out
from tiny_world.judge import judge
from tiny_world.pool import encoded
from tiny_world.scenes import PICTURE_PX
from tiny_world.train_forward import Pictures, train_forward

_GUIDANCE = 3.0
_SHIFT = 2.0
_STEPS = 16


@dataclass(frozen=True)
class Sources:
    """Source pictures of some edits: uint8 pixels and scaled latents; None for new pictures."""

    pixels_BCYX: Tensor | None = None
    latents_BCYX: Tensor | None = None


def quick_rates(
    network: HunyuanImage3ForCausalMM, rows: RowBuilder, picture_file: Path, *, count: int = 48
) -> dict[str, float]:
    """Return the share of held-out jobs drawn right, and of texts written exactly.

    Also writes a contact sheet.
    """
    lists, rates, sheets = held_out(), {}, []
    network.eval()
    kinds: list[tuple[str, Sequence[Wish | Edit]]] = [
        ("new", lists.prompts[:count]),
        ("edit", lists.edits[:count]),
    ]
    for kind, tasks in kinds:
        sources = _sources(network, tasks)
        for written in ("think_recaption", "none"):
            pixels_BCYX = drawn(network, rows, tasks, written, sources)
            rates[f"{kind}_{written}"] = _share_right(pixels_BCYX, tasks)
            sheets.append(pixels_BCYX)
        rates[f"{kind}_exact"] = _share_exact(network, rows, tasks, sources)
    write_sheet(torch.cat(sheets), picture_file)
    network.train()
    return rates


@torch.no_grad()
def drawn(
    network: HunyuanImage3ForCausalMM,
    rows: RowBuilder,
    tasks: Sequence[Wish | Edit],
    written: Written,
    sources: Sources,
) -> Tensor:
    """Return pictures uint8 [B, 3, Y, X], drawn after each task's correct text."""
    both = [_batch(rows, tasks, written, is_unconditional=flag) for flag in (False, True)]
    generator = torch.Generator().manual_seed(0)
    channels = network.arch.vae.latent_channels
    shape = (len(tasks), channels, LATENT_GRID, LATENT_GRID)
    latents_BCYX = torch.randn(shape, generator=generator)
    sigma = torch.linspace(1, 0, _STEPS + 1)
    sigmas = (_SHIFT * sigma / (1 + (_SHIFT - 1) * sigma)).tolist()
    for now, after in pairwise(sigmas):
        velocities = [_velocity(network, b, latents_BCYX, now, sources).cpu() for b in both]
        guided_BCYX = velocities[1] + _GUIDANCE * (velocities[0] - velocities[1])
        latents_BCYX = latents_BCYX + (after - now) * guided_BCYX
    return to_bytes(network.vae.decode(latents_BCYX.to(device_of(network.vae)))).cpu()


def write_sheet(pixels_NCYX: Tensor, file: Path, *, columns: int = 16) -> None:
    """Write pictures side by side as a PNG."""
    missing = -len(pixels_NCYX) % columns
    blank = torch.zeros(missing, *pixels_NCYX.shape[1:], dtype=torch.uint8)
    grid = torch.cat([pixels_NCYX, blank]).unflatten(0, (-1, columns))
    sheet = grid.permute(0, 3, 1, 4, 2).reshape(-1, columns * PICTURE_PX, 3)
    Image.fromarray(sheet.numpy()).save(file)


def _batch(
    rows: RowBuilder, tasks: Sequence[Wish | Edit], written: Written, *, is_unconditional: bool
) -> Batch:
    built = [rows.row(task, written, is_unconditional=is_unconditional) for task in tasks]
    return batch(built, rows.vocabulary, copies=1)


def _velocity(
    network: HunyuanImage3ForCausalMM,
    rows: Batch,
    latents_BCYX: Tensor,
    sigma: float,
    sources: Sources,
) -> Tensor:
    timesteps_B1 = torch.full((len(latents_BCYX), 1), 1000 * sigma)
    pictures = Pictures(
        latents_BCYX[:, None], timesteps_B1, sources.latents_BCYX, sources.pixels_BCYX
    )
    with mixed(device_of(network)):
        return train_forward(network, rows, pictures).velocity_BKCYX[:, 0]


def _sources(network: HunyuanImage3ForCausalMM, tasks: Sequence[Wish | Edit]) -> Sources:
    scenes = [task.source for task in tasks if isinstance(task, Edit)]
    if not scenes:
        return Sources()
    pixels_BCYX = render(scenes, no_jitter(len(scenes)))
    moments = encoded(network.vae, pixels_BCYX)
    mode_BCYX = torch.zeros_like(moments.mean_BCYX)
    latents_BCYX = network.vae.posterior_sample(moments.mean_BCYX, moments.logvar_BCYX, mode_BCYX)
    return Sources(pixels_BCYX, latents_BCYX)


def _share_right(pixels_BCYX: Tensor, tasks: Sequence[Wish | Edit]) -> float:
    right = 0
    for picture, task in zip(pixels_BCYX, tasks, strict=True):
        right += not judge(picture).wrong(*task.demand)
    return round(right / len(tasks), 4)


@torch.no_grad()
def _share_exact(
    network: HunyuanImage3ForCausalMM,
    rows: RowBuilder,
    tasks: Sequence[Wish | Edit],
    sources: Sources,
) -> float:
    """Return the share of rows that greedy decoding would write exactly.

    Every token is then the likeliest after the ones before it.
    """
    padded = _batch(rows, tasks, "think_recaption", is_unconditional=False)
    latents_BKCYX = torch.zeros(len(tasks), 1, network.arch.vae.latent_channels, 1, 1)
    latents_BKCYX = latents_BKCYX.expand(-1, -1, -1, LATENT_GRID, LATENT_GRID)
    pictures = Pictures(
        latents_BKCYX, torch.zeros(len(tasks), 1), sources.latents_BCYX, sources.pixels_BCYX
    )
    with mixed(device_of(network)):
        hidden_BSM = train_forward(network, padded, pictures).hidden_BSM
        likeliest_BS = network.lm_head(network.model.ln_f(hidden_BSM)).argmax(dim=-1).cpu()
    is_right_BS = (likeliest_BS == padded.next_ids_BS) | (padded.next_ids_BS < 0)
    return float(round(is_right_BS.all(dim=1).float().mean().item(), 4))
