"""How many jobs fit in memory together, and how much was used."""

import resource
import sys
from collections.abc import Iterable, Sequence

import torch

from hyimg_cli.engine.footprint import share_of
from hyimg_cli.loading.memory import available_bytes
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import BatchConfig, ModelChoice

# Of the memory that is free now: the rest is for the VAE and for what libraries take.
_USABLE = 0.6


def batch_size(
    jobs: Sequence[ImageJob], model: MixedModel, config: BatchConfig, revision: str | None
) -> int:
    """Jobs of a group that may work together: what was asked for, if they fit; at least one."""
    largest = max((job_bytes(job, model, revision) for job in jobs), default=1)
    return max(1, min(config.max_size, int(_USABLE * free_bytes(model) / largest)))


def job_bytes(job: ImageJob, model: MixedModel, revision: str | None = None) -> int:
    """Bytes that one more job takes, K/V and activations: see `footprint.share_of`."""
    share = share_of(job, model.card, model.dtype_name, revision)
    return max(1, share.kv + share.activations)


def free_bytes(model: MixedModel) -> int:
    """Bytes free for a model's work: on its GPUs, all as full as the fullest, or in main memory."""
    gpus = _gpus(model.layer_devices)
    if gpus:
        return len(gpus) * min(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    return available_bytes()


def room_bytes(choice: ModelChoice) -> int:
    """Bytes free for another model where `choice` puts it."""
    if choice.device == "cpu" or not torch.cuda.is_available():
        return available_bytes()
    if choice.device == "balanced":
        gpus = range(torch.cuda.device_count())
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    return torch.cuda.mem_get_info(torch.device(choice.device.replace("auto", "cuda")))[0]


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
