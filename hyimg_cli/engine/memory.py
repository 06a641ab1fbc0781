"""How many jobs fit in memory together, and how much was used."""

import resource
import sys
from collections.abc import Sequence

import torch

from hyimg_cli.engine.footprint import share_of
from hyimg_cli.loading.memory import available_bytes
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.run import BatchConfig

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
    gpus = _gpus(model)
    if gpus:
        return len(gpus) * min(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    return available_bytes()


def peak_memory_mb(model: MixedModel) -> float:
    """The largest allocation on the model's GPUs together, or the process's size, in MB."""
    gpus = _gpus(model)
    if gpus:
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 1e6
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def synchronize(model: MixedModel) -> None:
    """Wait for the model's GPUs, so that a phase's clock stops when its work is done."""
    for gpu in _gpus(model):
        # The work of this thread alone: what runs beside it has streams of its own.
        torch.cuda.current_stream(gpu).synchronize()


def _gpus(model: MixedModel) -> list[torch.device]:
    return sorted({d for d in model.layer_devices if d.type == "cuda"}, key=str)
