"""Machines of other sizes: free memory as a test has it, without a GPU."""

from collections.abc import Sequence

import pytest
import torch

from hyimg_cli.memory import available


def with_main_memory(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """So many bytes of main memory are free."""
    monkeypatch.setattr(available, "available_bytes", lambda: int(free))


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, free: Sequence[float], *, total: float | None = None
) -> None:
    """Hoppers of `total` bytes each, of which torch has none; by default all of it is free."""

    def info(gpu: torch.device | int) -> tuple[int, int]:
        number = gpu if isinstance(gpu, int) else gpu.index or 0
        return int(free[number]), int(free[number] if total is None else total)

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: len(free),
        "get_device_capability": lambda: (9, 0),
        "mem_get_info": info,
        "memory_reserved": lambda _: 0,
        "memory_allocated": lambda _: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
