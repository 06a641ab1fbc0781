"""Memory that one model of a run may have: main memory, a GPU's, a part of it, or all."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hyimg_cli.journal.keys import here, precision
from hyimg_cli.memory.refusals import UTILIZATION
from hyimg_cli.settings.run import RunConfig

if TYPE_CHECKING:
    import torch

_GB = 1_000_000_000
_MEMORY_GB = "[batch] memory_gb"


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

    def at_most(self, nbytes: int, limit: str) -> "AvailableMemory":
        """The same where a setting allows no more than `nbytes`."""
        return replace(self, free=nbytes, limit=limit) if nbytes < self.free else self


def available_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory:
    """The memory that is free where `config` puts a model; in main memory, for each replica.

    Raises MachineError where a GPU was asked for and there is none.
    """
    main, copies = available_bytes(), copies_of(config, replicas)
    found = AvailableMemory(_part(main, copies), main=main)
    if precision(config.model)[0] == "cuda":
        found = _on_gpus(config, main) or found
    limit = config.batch.memory_bytes
    return found if limit is None else found.at_most(_part(limit, copies), _MEMORY_GB)


def configured_memory(config: RunConfig, *, replicas: int = 1) -> AvailableMemory | None:
    """The memory that `config` states, for a plan that may be another machine's; None: nothing."""
    nbytes = config.batch.memory_bytes
    return None if nbytes is None else AvailableMemory(_part(nbytes, copies_of(config, replicas)))


def copies_of(config: RunConfig, replicas: int) -> int:
    """Number of replicas that share a memory: on GPUs each has its own."""
    return replicas if precision(config.model)[0] == "cpu" else 1


def replica_config(config: RunConfig, replicas: int) -> RunConfig:
    """The configuration of each replica: on a CPU it may fill its part of the one memory, or
    all of them would take for theirs what is free.
    """
    copies = copies_of(config, replicas)
    if copies == 1:
        return config
    free = available_bytes()
    part = _part(min(free, config.batch.memory_bytes or free), copies)
    return replace(config, batch=replace(config.batch, memory_gb=max(1, part // _GB)))


def makes_dense(config: RunConfig) -> bool:
    """True if this machine's GPU has no products of FP8 rows: experts that are held so are made
    dense for theirs.
    """
    choice = config.model
    if choice.quantization != "fp8" or choice.machine or not here().has_gpu:
        return False
    import torch

    from hyimg_cli.kernels.choice import takes_scaled

    return torch.cuda.is_available() and not takes_scaled(torch.cuda.get_device_capability())


def _part(nbytes: int, copies: int) -> int:
    """One of several equal parts, in whole GB as each is told."""
    part = nbytes // copies
    return part if copies == 1 or part < _GB else part // _GB * _GB


def _on_gpus(config: RunConfig, main: int) -> AvailableMemory | None:
    """The memory that is free on a model's GPUs, or the part of it that the run may use."""
    from hyimg_cli.parallel.devices import gpu_count, gpus_of

    choice, part = config.model, config.batch.gpu_memory_utilization
    gpus = gpus_of(choice)
    if not gpus:
        return None
    place = "all GPUs together" if choice.device == "balanced" else str(gpus[0])
    found = AvailableMemory(sum(map(gpu_free_bytes, gpus)), place, main, gpu_count())
    allowed = sum(gpu_free_bytes(gpu, part) for gpu in gpus)
    return found.at_most(allowed, f"{UTILIZATION} {part:g}") if part is not None else found


def available_bytes() -> int:
    """Main memory that can be used without swapping, reclaimable caches included.

    Without psutil, which comes with accelerate, only what is unused altogether is known.
    """
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def gpu_free_bytes(device: "torch.device | int", part: float | None = None) -> int:
    """Memory of a GPU that new tensors can have: what the driver has, and what this process keeps.

    Of tensors that are gone torch's allocator keeps the memory, for the next ones. `part`: of all
    the GPU's memory this process may use no more, what its tensors have counted in.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free = int(free + torch.cuda.memory_reserved(device) - held)
    return free if part is None else max(0, min(free, int(part * total) - held))
