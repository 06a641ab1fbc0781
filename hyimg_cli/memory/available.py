"""Memory that one model of a run may have: main memory, a GPU's, a part of it, or all; and how many
jobs work together in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import Together, held_weights, needs, usable_bytes
from hyimg_cli.memory.refusals import UTILIZATION, refuse_gpu_part
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.units import bytes_text

if TYPE_CHECKING:
    import torch

    from hyimg_cli.models.common.model import DecoderModel


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that one model may have in all.

    `free` is on its device, `main` in main memory, None where that is not known. `gpus`: how many
    there are, 0 where the run is on a CPU or they are not known. `limit`: the setting by which it
    is less than what is free.
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
        """The same where a setting allows no more than `nbytes`."""
        return replace(self, free=nbytes, limit=limit) if nbytes < self.free else self


def available_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory:
    """The memory that is free where `config` puts a model; in main memory, for each replica.

    Raises MachineError where a GPU was asked for and there is none.
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
    return found if limit is None else found.at_most(limit // copies, "[batch] memory_gb")


def configured_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory | None:
    """The memory that `config` states, for a plan that may be another machine's; None: nothing."""
    nbytes = config.batch.memory_bytes
    return None if nbytes is None else AvailableMemory(nbytes // copies_of(config, replicas))


def copies_of(config: RunConfig, replicas: int) -> int:
    """Number of replicas that share a memory: on GPUs each has its own."""
    return replicas if precision(config.model)[0] == "cpu" else 1


def replica_config(config: RunConfig, replicas: int) -> RunConfig:
    """The configuration of each replica: on a CPU it may fill its part of the one memory, or
    all of them would take for theirs what is free.
    """
    if copies_of(config, replicas) == 1:
        return config
    part = available_memory(config, replicas=replicas).free
    return replace(config, batch=replace(config.batch, memory_gb=part / 1e9))


def available_bytes() -> int:
    """Main memory that can be used without swapping, reclaimable caches included."""
    import psutil

    return int(psutil.virtual_memory().available)


def gpu_free_bytes(device: "torch.device", part: float | None = None) -> int:
    """Memory of a GPU that new tensors can have: what the driver has, and what this process keeps.

    Of tensors that are gone torch's allocator keeps the memory, for the next ones. `part`: of all
    the GPU's memory this process may use no more, what its tensors have counted in.
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
    """Jobs of a group that may think and that may draw together: as many as asked for, if they
    fit; at least one of each. `held_prefixes`: bytes of shared K/V that are no longer free;
    `joins`: as of `Needs`.
    """
    room = free_bytes(model, config.batch.gpu_memory_utilization)
    if (limit := config.batch.memory_bytes) is not None:
        room = min(room, limit - held_weights(model.card, config) - held_prefixes)
    kept = max(0, config.batch.prefix_cache_mb * 1_000_000 - held_prefixes)
    if joins:  # a server's prefixes fill all that they may
        room, kept = room - kept, 0
    found = replace(needs(jobs, model.card, config, prefixes=kept), joins=joins)
    return found.fitting(usable_bytes(room), config.batch.max_size)


def free_bytes(model: "DecoderModel", part: float | None = None) -> int:
    """Bytes free for a model's work: on its GPUs, all as full as the fullest, or in main memory.

    `part`: of each GPU's memory the run may use no more, weights and all.
    """
    from hyimg_cli.kernels.devices import gpus_among

    if gpus := gpus_among(model.layer_devices):
        return len(gpus) * min(gpu_free_bytes(gpu, part) for gpu in gpus)
    return available_bytes()


def limit_gpu_memory(config: RunConfig, *, is_over: bool = False) -> None:
    """Have torch refuse this process more of its GPUs than `gpu_memory_utilization` says, until the
    session `is_over`: what comes after it may have no part.

    Ranks beside it are not told: they hold less than rank 0. Raises UsageError on a CPU.
    """
    import torch

    from hyimg_cli.parallel.devices import gpus_of

    if not is_over:
        refuse_gpu_part(config)
    part = config.batch.gpu_memory_utilization
    if part is not None and torch.cuda.is_available():
        for gpu in gpus_of(config.model):
            torch.cuda.set_per_process_memory_fraction(1.0 if is_over else part, gpu)
