"""How many jobs fit in memory together."""

import os
from collections.abc import Sequence

import torch

from hyimg_cli.errors import JobError
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.models.registry import job_tokens
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.run import BatchConfig

# Of the memory that is free now: the rest is for activations and the VAE.
_USABLE = 0.5
_BF16_BYTES = 2


def batch_size(jobs: Sequence[ImageJob], model: MixedModel, config: BatchConfig) -> int:
    """Jobs of a group that may work together: what was asked for, if its K/V fit; at least one."""
    largest = max((job_bytes(job, model) for job in jobs), default=1)
    return max(1, min(config.max_size, int(_USABLE * free_bytes() / largest)))


def job_bytes(job: ImageJob, model: MixedModel) -> int:
    """Bytes of one job's K/V while its branches are built: the context and every branch.

    A job whose sequence cannot be built fails later, for its own reason, and takes none.
    """
    square = [Size(1, 1)] * len(job.images)
    try:
        tokens = job_tokens(job, square, assumed_think=job.text.max_new_tokens)
    except JobError:
        return 1
    rows = 2 * tokens.positive + tokens.negative + tokens.branches * tokens.step_rows
    width = 4 if model.dtype_name == "float32" else 2
    return rows * model.card.kv_bytes_per_token * width // _BF16_BYTES


def free_bytes() -> int:
    """Bytes free on the GPU, or in main memory where there is none."""
    if torch.cuda.is_available():
        free: int = torch.cuda.mem_get_info()[0]
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
