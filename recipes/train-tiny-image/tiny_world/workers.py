"""Several single-threaded processes that train one module together.

With one thread each, because several threads wait for each other at every barrier between many
short kernels, and much longer if other programs use the machine. Here the workers meet once a step.
"""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn


def run_workers(
    count: int, tick: Callable[[], None], work: Callable[..., None], *arguments: Any
) -> None:
    """Call `work(*arguments)` in `count` processes that share gradients; in this one if 1.

    `tick` is called every few seconds.
    """
    if count == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        work(*arguments)
        torch.set_num_threads(threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        given = (count, str(Path(folder) / "meeting"), work, arguments)
        context = spawn(_worker, args=given, nprocs=count, join=False)
        while not context.join(timeout=2.0):
            tick()


def rank() -> int:
    """Return this worker's number; 0 writes the log and the files."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of workers."""
    return dist.get_world_size() if dist.is_initialized() else 1


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over the workers, with one message a step."""
    if world_size() == 1:
        return
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    shaped = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(gradients, shaped)


def agreed(value: float) -> float:
    """Return worker 0's value in every worker: clocks and decisions must not differ."""
    if world_size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.item()


def _worker(
    number: int, count: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=number,
        world_size=count,
        timeout=timedelta(minutes=30),
    )
    work(*arguments)
    dist.destroy_process_group()
