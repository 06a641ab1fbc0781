"""The contents of `run.json`: versions, hardware, flags with their origin, and digests."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from hyimg_cli import __version__
from hyimg_cli.errors import installed_version
from hyimg_cli.manifest.manifest import Manifest
from hyimg_cli.models import registry
from hyimg_cli.settings.config import Setting
from hyimg_cli.spec.gc_paused import gc_paused
from hyimg_cli.spec.model_name import parts_of
from hyimg_cli.spec.plan import Plan

PACKAGES = ("torch", "transformers", "diffusers", "safetensors", "tokenizers", "numpy", "pillow")
CPU_FACTS = Path("/proc/cpuinfo")


def run_info(manifest: Manifest, settings: Mapping[str, Setting], plan: Plan) -> dict[str, Any]:
    """Return the contents of `run.json`.

    Paths are cut to their last part, so a result folder can be shared as it is.
    """
    revision = settings["revision"].value
    models = dict.fromkeys(group.model for group in plan.groups)
    return {
        "versions": {**versions(), "av": installed_version("av") or "not installed"},
        "hardware": hardware(),
        "flags": {
            name: {"value": portable(setting.value), "origin": setting.origin}
            for name, setting in settings.items()
        },
        "manifest": {"name": manifest.title, "digest": manifest.digest},
        "models": {portable(name): registry.fingerprint(name, revision) for name in models},
    }


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python, hyimg and the packages that can change a picture."""
    packages = {name: installed_version(name) or "not installed" for name in PACKAGES}
    return {"python": platform.python_version(), "hyimg": __version__} | packages


def hardware() -> dict[str, Any]:
    """Return a description of the machine: processor, cores this process may use, GPUs."""
    with gc_paused():
        import torch
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def cpu_name() -> str:
    """Return the processor's marketing name if the system reports it."""
    facts = CPU_FACTS.read_text(errors="replace") if CPU_FACTS.is_file() else ""
    named = re.search(r"^model name\s*:(.*)", facts, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def portable(value: Any) -> Any:
    """Return `value` as JSON; absolute paths lose their folders."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple):
        return [portable(one) for one in value]
    names = [name for name in parts_of(str(value)) if name]
    return "+".join(PurePath(one).name if PurePath(one).is_absolute() else one for one in names)
