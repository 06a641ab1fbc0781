"""Which quantizations have kernels here: the engine's own choice, made on a tiny layer of each."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.doctor.check import Check
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import precision
from hyimg_cli.settings.run import QUANTIZATIONS, Quantization, RunConfig

if TYPE_CHECKING:
    import torch

_EXPERTS, _WIDTH = 1, 64


def kernels(config: RunConfig) -> Check:
    """Check each quantization for kernels, and name the optional packages they rest on."""
    import torch

    (kind, dtype), chosen = precision(config.model), config.model.quantization
    device = torch.device(kind if kind == "cpu" or torch.cuda.is_available() else "cpu")
    found, missing = [], ""
    for form in QUANTIZATIONS:
        try:
            found.append(f"{form}: {_choice(form, device, dtype)}")
        except MachineError as error:
            found.append(f"{form}: {error.what}")
            missing = error.hint if form == chosen else missing
    told = f"on {device.type}: {'; '.join(found)} ({', '.join(_optional_packages())})"
    if missing:
        return Check("failed", told, missing)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return Check("warning", told, "install triton: without it experts run unfused, and slower")
    if device.type == "cuda" and (lacking := _lacking()):
        hint = (
            "install gcc and Python's headers (python3-dev), or set CC: Triton builds what starts "
        )
        hint += "its kernels when the first one runs"
        return Check("failed", f"{told}; {lacking}", hint)
    return Check("ok", told)


def _choice(form: Quantization, device: "torch.device", dtype: str) -> str:
    """What is said of a quantization. Raises MachineError where it has no kernel here."""
    import torch

    from hyimg_cli.kernels.choice import experts_of
    from hyimg_cli.kernels.formats import Stack, empty_stack

    def stack(rows: int) -> Stack:
        if form == "none":
            return torch.empty(_EXPERTS, rows, _WIDTH, device=device)
        return empty_stack(form, _EXPERTS, rows, _WIDTH, device)

    experts_of(stack(2 * _WIDTH), stack(_WIDTH))
    return f"works{_bound(form, device, dtype)}"


def _bound(form: Quantization, device: "torch.device", dtype: str) -> str:
    """A bound on decode steps as CUDA graphs; empty: there is none, or there are no graphs."""
    import torch

    from hyimg_cli.kernels.choice import ANY_ROWS, rows_unread

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ""
    capability = torch.cuda.get_device_capability(device)
    rows = rows_unread(capability, getattr(torch, dtype), form)
    if rows == ANY_ROWS:
        return ""
    return f", CUDA graphs up to {rows} rows" if rows else ", no CUDA graphs"


def _lacking() -> str:
    """The one thing that Triton needs and this machine has not; empty where nothing is missing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else "no Python.h"


def _optional_packages() -> Iterator[str]:
    for name in ("triton", "bitsandbytes"):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
