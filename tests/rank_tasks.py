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
from hyimg_cli.models.tiled_vaes import TiledVaeLoader
from hyimg_cli.parallel.ranks import Rank


def number(rank: Rank) -> int:
    return rank.number


def threads_and_pid(rank: Rank) -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


def summed(rank: Rank) -> float:
    """A collective: what tensor-parallel layers do."""
    value = torch.full((3,), float(rank.number + 1))
    dist.all_reduce(value)
    return float(value[0])


def die(rank: Rank, victim: int) -> None:
    """Rank 0 waits for a tensor that a killed member will never send."""
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.number == 0:
        dist.recv(torch.zeros(1), victim)


def fail(rank: Rank, victim: int) -> None:
    """The same with a member that raises."""
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
class DyingVae:
    """A VAE loader; that member dies in its second tile, once, if the file is there."""

    loader: TiledVaeLoader
    victim: int
    trigger: Path

    def __call__(self, rank: Rank) -> Any:
        vae = self.loader(rank)
        if rank.number == self.victim:
            decode, seen = vae.decode_tile, []

            def decode_tile(latents: torch.Tensor) -> torch.Tensor:
                seen.append(1)
                if len(seen) > 1 and self.trigger.exists():
                    self.trigger.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return decode(latents)

            vae.decode_tile = decode_tile
        return vae
