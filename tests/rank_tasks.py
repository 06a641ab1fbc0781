"""Tasks and loaders that ranks of a test are given; members import them by name."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyimg_cli.errors import CheckpointError
from hyimg_cli.parallel.ranks import Rank
from hyimg_cli.spec.card import TileRule


def number(rank: Rank) -> int:
    return rank.number


def parts(rank: Rank) -> list[str]:
    return sorted(rank.parts)


def threads_and_pid(rank: Rank) -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


def summed(rank: Rank) -> float:
    """A collective: what tensor-parallel layers do."""
    value = torch.full((3,), float(rank.number + 1))
    dist.all_reduce(value)
    return float(value[0])


def fail(rank: Rank, victim: int) -> None:
    """A member raises; rank 0 waits for a tensor that it will never send."""
    if rank.number == victim:
        raise ValueError("a bad tile")
    if rank.number == 0:
        dist.recv(torch.zeros(1), victim)


def fail_at_home(rank: Rank) -> None:
    """Rank 0 raises while a member waits for it."""
    if rank.number == 0:
        raise KeyError("rank 0 itself")
    dist.recv(torch.zeros(1), 0)


def wait_for(rank: Rank, silent: int) -> None:
    """Rank 0 waits for a tensor from a member that lives and sends none."""
    if rank.number == silent:
        time.sleep(30)
    if rank.number == 0:
        dist.recv(torch.zeros(1), silent)


def sleep(rank: Rank, seconds: float) -> None:
    if rank.number:
        time.sleep(seconds)


def absent(rank: Rank) -> Any:
    raise CheckpointError("no such weights", where=f"rank {rank.number}", hint="look again")


def absent_on_members(rank: Rank) -> str:
    if rank.number:
        absent(rank)
    return "here"


@dataclass(frozen=True)
class Nothing:
    """A part that is no model."""

    choice: Any

    def __call__(self, rank: Rank) -> str:
        return f"rank {rank.number}"


def load_by(part: Any, choice: Any, rank: Rank) -> Any:
    """What a `part` of these loads in the place of a checkpoint's."""
    return part(choice)(rank)


@dataclass(frozen=True)
class DiesOnMembers:
    """A part whose loading the system ends on every rank but the first."""

    choice: Any

    def __call__(self, rank: Rank) -> str:
        if rank.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return "here"


class PlainVae:
    """A decoder of one convolution: cells of four pixels, tiles of eight cells."""

    tiling = TileRule(8, 6, 4)
    tile_channels = 3

    def __init__(self) -> None:
        torch.manual_seed(6)
        self.spread = torch.nn.Conv2d(4, 48, 3, padding=1).requires_grad_(False)

    def tile_frames(self, latent_frames: int) -> int:
        return latent_frames

    def decode_tile(self, latents: torch.Tensor) -> torch.Tensor:
        batch, channels, frames, rows, columns = latents.shape
        flat = latents.transpose(1, 2).reshape(batch * frames, channels, rows, columns)
        pixels = torch.nn.functional.pixel_shuffle(self.spread(flat), 4)
        return pixels.unflatten(0, (batch, frames)).transpose(1, 2)

    def finish(self, merged: torch.Tensor) -> torch.Tensor:
        return merged


@dataclass(frozen=True)
class ShortVae:
    """A VAE loader; on rank 1 a tile finds no memory for each file that is in `folder`. `choice`: a
    checkpoint's autoencoder, None for a plain one.
    """

    folder: Path
    choice: Any = None

    def __call__(self, rank: Rank) -> Any:
        vae: Any = PlainVae() if self.choice is None else self._stored(rank)
        if rank.number == 1:
            decode = vae.decode_tile

            def decode_tile(latents: torch.Tensor) -> torch.Tensor:
                for left in self.folder.iterdir():
                    left.unlink()
                    raise torch.OutOfMemoryError(f"no room for {left.name}")
                decoded: torch.Tensor = decode(latents)
                return decoded

            vae.decode_tile = decode_tile
        return vae

    def _stored(self, rank: Rank) -> Any:
        # Imported here: other tasks know of no video.
        from hyimg_cli.pipelines.ranks import load_vae

        return load_vae(self.choice, rank)


@dataclass(frozen=True)
class DyingVae:
    """A VAE loader; that member dies in its second tile, once, if the file is there."""

    victim: int
    trigger: Path

    def __call__(self, rank: Rank) -> PlainVae:
        vae = PlainVae()
        if rank.number == self.victim:
            decode, seen = vae.decode_tile, []

            def decode_tile(latents: torch.Tensor) -> torch.Tensor:
                seen.append(1)
                if len(seen) > 1 and self.trigger.exists():
                    self.trigger.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return decode(latents)

            vae.decode_tile = decode_tile  # type: ignore[method-assign]
        return vae
