"""GPUs that torch finds, which of them a model uses, and whether they are deterministic."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hyimg_cli.errors import MachineError
from hyimg_cli.settings.run import ModelChoice


def gpu_count() -> int:
    """Return the number of GPUs that this process can use."""
    return torch.cuda.device_count()


def refuse_missing_gpus(count: int, who: str, hint: str, *, code: str = "") -> None:
    """Raise MachineError unless each of `count` processes (`who`) has a GPU."""
    found = gpu_count()
    if found < count:
        raise MachineError(
            f"{count} {who} need {count} GPUs; torch finds {found}",
            hint=hint,
            code=code or f"machine.{who}",
        )


def device_of(choice: ModelChoice) -> str:
    """Return a model's device: "cpu", a GPU's name, or "balanced" over all GPUs.

    Raises MachineError if a requested GPU is not found.
    """
    has_gpu = torch.cuda.is_available()
    if choice.kind(has_gpu=has_gpu) == "cpu":
        return "cpu"
    if not has_gpu:
        raise MachineError(
            f"torch finds no GPU for --device {choice.device}",
            hint="use --device cpu, or install a torch build for this GPU",
            code="machine.no-gpu",
        )
    name = {"auto": "cuda:0", "cuda": "cuda:0"}.get(choice.device, choice.device)
    if name.startswith("cuda:") and int(name.removeprefix("cuda:")) >= gpu_count():
        raise MachineError(
            f"--device {name} does not exist (torch finds {gpu_count()} GPUs, counted from 0)",
            hint=f"use --device cuda:{gpu_count() - 1} or lower",
            code="machine.no-gpu",
        )
    return name


def gpus_of(choice: ModelChoice) -> list[torch.device]:
    """Return the GPUs of a model; none on the CPU. Raises MachineError as `device_of`."""
    name = device_of(choice)
    if name == "cpu":
        return []
    if name == "balanced":
        return [torch.device("cuda", number) for number in range(gpu_count())]
    return [torch.device(name)]


@contextmanager
def restored_environment(*names: str) -> Iterator[None]:
    """Restore environment variables at the end of the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_determinism(is_deterministic: bool) -> None:
    """Make torch use only algorithms that give the same bits again, or stop doing so.

    For the same machine and shapes; an operation without such an algorithm raises. Call before the
    first product on a GPU: cuBLAS reads the size of its workspace once.
    """
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # Memory that is about to be overwritten need not be filled first.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if is_deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(is_deterministic)
