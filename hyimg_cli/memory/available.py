"""Find the memory that a model of a run may use, and how many jobs work together in it.

The memory is main memory, a GPU's, a part of it, or all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import Together, held_weights, needs, usable_bytes
from hyimg_cli.memory.refusals import UTILIZATION, refuse_gpu_part
from hyimg_cli.memory.videos import most_joined, needs_of
from hyimg_cli.models.registry import model_card
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.units import bytes_text

if TYPE_CHECKING:
    import torch

    from hyimg_cli.models.common.model import DecoderModel

_MEMORY_GB = "[batch] memory_gb"


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that one model may use in all.

    `free`: on its device; `main`: in main memory, None if unknown. `gpus`: their number, 0 if the
    run is on a CPU or it is unknown. `limit`: the setting that allows less than what is free.
    """

    free: int
    place: str = "main memory"
    main: int | None = None
    gpus: int = 0
    limit: str = ""

    def __str__(self) -> str:
        free = bytes_text(self.free)
        return f"{self.limit} allows {free}" if self.limit else f"{self.place} has {free} free"

    def at_most(self, nbytes: int, limit: str) -> "AvailableMemory":
        """Return the same, limited to `nbytes` by a setting."""
        return replace(self, free=nbytes, limit=limit) if nbytes < self.free else self


def available_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory:
    """Return the free memory where `config` puts a model; in main memory, for each replica.

    Raises MachineError if a GPU was requested and there is none.
    """
    main, copies = available_bytes(), copies_of(config, replicas)
    found = AvailableMemory(main // copies, main=main)
    if precision(config.model)[0] == "cuda":
        from hyimg_cli.parallel.devices import gpu_count, gpus_of

        if gpus := gpus_of(config.model):
            place = "all GPUs together" if config.model.device == "balanced" else str(gpus[0])
            found = AvailableMemory(sum(map(gpu_free_bytes, gpus)), place, main, gpu_count())
            if (part := config.batch.gpu_memory_utilization) is not None:
                allowed = sum(gpu_free_bytes(gpu, part) for gpu in gpus)
                found = found.at_most(allowed, f"{UTILIZATION} {part:g}")
    limit = config.batch.memory_bytes
    return found if limit is None else found.at_most(limit // copies, _MEMORY_GB)


def configured_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory | None:
    """Return the memory that `config` states, for a plan of another machine; None without one."""
    nbytes = config.batch.memory_bytes
    if nbytes is None:
        return None
    return AvailableMemory(nbytes // copies_of(config, replicas), limit=_MEMORY_GB)


def copies_of(config: RunConfig, replicas: int) -> int:
    """Return the number of replicas that share a memory; on GPUs each has its own."""
    return replicas if precision(config.model)[0] == "cpu" else 1


def replica_config(config: RunConfig, replicas: int) -> RunConfig:
    """Return the configuration of a replica; on a CPU, each may fill its part of the memory."""
    if copies_of(config, replicas) == 1:
        return config
    part = available_memory(config, replicas=replicas).free
    return replace(config, batch=replace(config.batch, memory_gb=part / 1e9))


def available_bytes() -> int:
    """Return main memory that can be used without swapping, including reclaimable caches."""
    import psutil

    return int(psutil.virtual_memory().available)


def gpu_free_bytes(device: "torch.device", part: float | None = None) -> int:
    """Return a GPU's memory for new tensors: free in the driver, or cached by this process.

    torch's allocator keeps the memory of freed tensors for the next ones. `part`: the fraction of
    the GPU's memory that this process may use, including its tensors.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free = int(free + torch.cuda.memory_reserved(device) - held)
    return free if part is None else max(0, min(free, int(part * total) - held))


def batch_sizes(
    jobs: Sequence[ImageJob],
    model: "DecoderModel",
    config: RunConfig,
    *,
    held_prefixes: int = 0,
    joins: bool = False,
) -> Together:
    """Return how many jobs of a group may think and draw together, at least one each.

    As many as requested, if they fit. `held_prefixes`: bytes of shared K/V that are no longer free;
    `joins`: as in `Needs`.
    """
    room = free_bytes(model, config.batch.gpu_memory_utilization)
    if (limit := config.batch.memory_bytes) is not None:
        room = min(room, limit - held_weights(model.card, config) - held_prefixes)
    kept = max(0, config.batch.prefix_cache_mb * 1_000_000 - held_prefixes)
    if joins:  # a server's prefixes fill all the memory that they may use
        room, kept = room - kept, 0
    found = replace(needs(jobs, model.card, config, prefixes=kept), joins=joins)
    return found.fitting(usable_bytes(room), config.batch.max_size)


def joined_pictures(job: ImageJob, config: RunConfig) -> int:
    """Return how many pictures like this one a loaded editor may denoise together, at least 1."""
    networks = model_card(job.model, config.model.revision).networks
    assert networks is not None, "its model denoises latents"
    free = available_memory(replace(config, batch=replace(config.batch, memory_gb=None))).free
    if config.model.cpu_offload != "none":  # the transformer comes for the steps
        free -= needs_of(job, networks, config)["denoise"].weights
    return most_joined(job, networks, config, free)


def free_bytes(model: "DecoderModel", part: float | None = None) -> int:
    """Return the bytes free for a model's work, on its GPUs or in main memory.

    Each GPU counts as the fullest one. `part`: the fraction of each GPU's memory that the run may
    use, including weights.
    """
    from hyimg_cli.kernels.devices import gpus_among

    if gpus := gpus_among(model.layer_devices):
        return len(gpus) * min(gpu_free_bytes(gpu, part) for gpu in gpus)
    return available_bytes()


def limit_gpu_memory(config: RunConfig, *, is_over: bool = False) -> None:
    """Limit this process's GPU memory to `gpu_memory_utilization` until the session `is_over`.

    A later session may have no limit. Other ranks are not limited: they hold less than rank 0.
    Raises UsageError on a CPU.
    """
    import torch

    from hyimg_cli.parallel.devices import gpus_of

    if not is_over:
        refuse_gpu_part(config)
    part = config.batch.gpu_memory_utilization
    if part is not None and torch.cuda.is_available():
        for gpu in gpus_of(config.model):
            torch.cuda.set_per_process_memory_fraction(1.0 if is_over else part, gpu)
