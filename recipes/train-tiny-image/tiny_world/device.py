"""The devices on which workers compute.

All random data is drawn on the CPU and moved, so a seed means the same pictures and noise on any
device.
"""

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor, nn

from tiny_world.workers import rank

Tensors = TypeVar("Tensors")


def worker_device(name: str) -> torch.device:
    """Return this worker's device: `cpu`, one GPU (`cuda:1`), or with `cuda` the GPUs in turn."""
    if name == "cuda":
        return torch.device("cuda", rank() % torch.cuda.device_count())
    return torch.device(name)


def fault(name: str) -> str:
    """Return what is wrong with a device's name on this machine; empty if nothing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"{name} is no device: cpu, cuda, or cuda:N"
    if device.type not in ("cpu", "cuda"):
        return f"{name} is not supported: cpu, cuda, or cuda:N"
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        return f"{name} was asked for, and torch finds {found} GPUs"
    return ""


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(module.parameters()).device


def mixed(device: torch.device) -> torch.autocast:
    """Compute products in bfloat16, on any device."""
    return torch.autocast(device.type, torch.bfloat16)


def moved(data: Tensors, device: torch.device) -> Tensors:
    """Return a dataclass with its tensors on `device`; tensors already there are not copied."""
    assert dataclasses.is_dataclass(data)
    assert not isinstance(data, type)
    fields = {name: value for name, value in vars(data).items() if isinstance(value, Tensor)}
    return dataclasses.replace(data, **{n: t.to(device) for n, t in fields.items()})
