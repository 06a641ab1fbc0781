"""How many jobs fit in memory together, and how much was used."""

import resource
import sys
from collections.abc import Iterable, Sequence

import torch

from hyimg_cli.engine.footprint import USABLE, Together, held_weights, needs
from hyimg_cli.loading.memory import available_bytes, gpu_free_bytes
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import ModelChoice, RunConfig


def batch_sizes(
    jobs: Sequence[ImageJob], model: MixedModel, config: RunConfig, *, held_prefixes: int = 0
) -> Together:
    """Jobs of a group that may think and that may draw together: as many as asked for, if they
    fit; at least one of each. `held_prefixes`: bytes of shared K/V that are no longer free.
    """
    room = free_bytes(model)
    if config.batch.memory_bytes is not None:
        taken = held_weights(model.card, config) + held_prefixes
        room = min(room, config.batch.memory_bytes - taken)
    found = needs(jobs, model.card, config, held_prefixes=held_prefixes)
    return found.fitting(int(USABLE * room), config.batch.max_size)


def free_bytes(model: MixedModel) -> int:
    """Bytes free for a model's work: on its GPUs, all as full as the fullest, or in main memory."""
    gpus = _gpus(model.layer_devices)
    if gpus:
        return len(gpus) * min(map(gpu_free_bytes, gpus))
    return available_bytes()


def room_bytes(choice: ModelChoice) -> int:
    """Bytes free for another model where `choice` puts it."""
    if choice.device == "cpu" or not torch.cuda.is_available():
        return available_bytes()
    if choice.device == "balanced":
        return sum(map(gpu_free_bytes, range(torch.cuda.device_count())))
    return gpu_free_bytes(torch.device(choice.device.replace("auto", "cuda")))


def peak_memory_mb(devices: Iterable[torch.device]) -> float:
    """The largest allocation on a model's GPUs together, or the process's size, in MB."""
    gpus = _gpus(devices)
    if gpus:
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e6
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for a model's GPUs, so that a phase's clock stops when its work is done."""
    for gpu in _gpus(devices):
        # The work of this thread alone: what runs beside it has streams of its own.
        torch.cuda.current_stream(gpu).synchronize()


def _gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    return sorted({d for d in devices if d.type == "cuda"}, key=str)
