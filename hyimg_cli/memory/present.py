"""How much memory is free: main memory, on any system that a laptop may run, and a GPU's."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
