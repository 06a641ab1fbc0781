"""Choose how many jobs work together in the memory that is free, and measure what was used."""

import resource
import sys
from collections.abc import Iterable, Sequence

import torch

from hyimg_cli.memory.available import available_bytes, gpu_free_bytes
from hyimg_cli.memory.footprint import Together, held_weights, needs, usable_bytes
from hyimg_cli.memory.refusals import refuse_in_session
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.parallel.devices import gpus_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob


def batch_sizes(
    jobs: Sequence[ImageJob], model: MixedModel, config: RunConfig, *, held_prefixes: int = 0
) -> Together:
    """Jobs of a group that may think and that may draw together: as many as asked for, if they
    fit; at least one of each. `held_prefixes`: bytes of shared K/V that are no longer free.
    """
    room = free_bytes(model, config.batch.gpu_memory_utilization)
    if config.batch.memory_bytes is not None:
        taken = held_weights(model.card, config) + held_prefixes
        room = min(room, config.batch.memory_bytes - taken)
    found = needs(jobs, model.card, config, held_prefixes=held_prefixes)
    return found.fitting(usable_bytes(room), config.batch.max_size)


def free_bytes(model: MixedModel, part: float | None = None) -> int:
    """Bytes free for a model's work: on its GPUs, all as full as the fullest, or in main memory.

    `part`: of each GPU's memory the run may use no more, weights and all.
    """
    gpus = _gpus(model.layer_devices)
    if gpus:
        return len(gpus) * min(gpu_free_bytes(gpu, part) for gpu in gpus)
    return available_bytes()


def limit_gpu_memory(config: RunConfig) -> None:
    """Have torch refuse this process more of its GPUs than `gpu_memory_utilization` says.

    Ranks beside it are not told: they hold less than rank 0. Raises UsageError on a CPU.
    """
    refuse_in_session(config)
    part = config.batch.gpu_memory_utilization
    if part is not None:
        for gpu in gpus_of(config.model):
            torch.cuda.set_per_process_memory_fraction(part, gpu)


def lift_gpu_limit(config: RunConfig) -> None:
    """Let this process have all of its GPUs again: what comes after a session may have no part."""
    if config.batch.gpu_memory_utilization is not None and torch.cuda.is_available():
        for gpu in gpus_of(config.model):
            torch.cuda.set_per_process_memory_fraction(1.0, gpu)


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
