"""How much main memory is free, on any system that a laptop may run."""

import os


def available_bytes() -> int:
    """Main memory that can be used without swapping, reclaimable caches included.

    Without psutil, which comes with accelerate, only what is unused altogether is known.
    """
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)
