"""Which kernels a layer's experts would run on here: the engine's own choice, made on a tiny layer
of each format.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.doctor.check import Check, Subject
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.fit import FORMS
from hyimg_cli.settings.run import Quantization

if TYPE_CHECKING:
    import torch

_EXPERTS, _WIDTH = 1, 64


def kernels(subject: Subject) -> Check:
    """The choice for each quantization, and which optional packages it rests on."""
    import torch

    (kind, dtype), chosen = precision(subject.config.model), subject.config.model.quantization
    device = torch.device(kind if kind == "cpu" or torch.cuda.is_available() else "cpu")
    found, missing = [], ""
    for form in FORMS:
        try:
            found.append(f"{form}: {_choice(form, device, dtype)}")
        except MachineError as error:
            found.append(f"{form}: {error.what}")
            missing = error.hint if form == chosen else missing
    told = f"on {device.type}: {'; '.join(found)} ({', '.join(_optional_packages())})"
    if missing:
        return Check("kernels", "failed", told, missing)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        hint = "install triton: without it experts run unfused, and slower"
        return Check("kernels", "warning", told, hint)
    if device.type == "cuda" and (lacking := _lacking()):
        hint = (
            "install gcc and Python's headers (python3-dev), or set CC: Triton builds what starts "
        )
        hint += "its kernels when the first one runs"
        return Check("kernels", "failed", f"{told}; {lacking}", hint)
    return Check("kernels", "ok", told)


def _choice(form: Quantization, device: "torch.device", dtype: str) -> str:
    import torch

    from hyimg_cli.kernels.choice import experts_of
    from hyimg_cli.kernels.formats import Stack, empty_stack

    def stack(rows: int) -> Stack:
        if form == "none":
            return torch.empty(_EXPERTS, rows, _WIDTH, device=device)
        return empty_stack(form, _EXPERTS, rows, _WIDTH, device)

    return _named(experts_of(stack(2 * _WIDTH), stack(_WIDTH))) + _bound(form, device, dtype)


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


def _named(experts: Any) -> str:
    """A kernel's name; of two that are taken by the number of rows, both."""
    from hyimg_cli.kernels.choice import ByRows

    if isinstance(experts, ByRows):
        few, many = _named(experts.few), _named(experts.many)
        return f"{few} up to {experts.most_few} rows, {many} above"
    return str(experts.func.__name__ if isinstance(experts, partial) else experts.__name__)


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
