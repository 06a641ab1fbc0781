"""Measured values, saved as soon as they exist, and printed line by line."""

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hyimg_cli.errors import installed_version
from hyimg_cli.journal.provenance import hardware, versions
from shapes.cases import Row
from shapes.requests import Served

# Maximum length of a row's name in a line.
WIDTH = 48
NOTES = (
    "random weights: routing is nearly even, except in the skewed row; no picture means anything",
    "milliseconds are medians; the first call is apart; spread is least and most",
    "per_layer divides a call's time by the layers that were run (is_whole: all of the network's); "
    "rows of form any run no layer",
    "floor: the larger of FLOP at the measured product's speed and bytes at the measured copy's; "
    "of the VAE and of convolutions FLOP alone, at the speed of a product in bfloat16",
    "rows called graph use CUDA graphs, and so do requests unless they say otherwise: the default",
)
# Environment variables that change what is measured.
_ENVIRONMENT = (
    "TORCH_CUDNN_SDPA_AVOID_RECOMPILE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
)
_KERNELS_SHOWN = 3


@dataclass
class Kept:
    """Everything measured so far."""

    out: Path | None
    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    requests: list[Served] = field(default_factory=list)
    building: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """Return the result as it is written."""
        return self.facts | {
            "building": self.building,
            "rows": [asdict(row) for row in self.rows],
            "requests": [asdict(served) for served in self.requests],
            "profiles": self.profiles,
            "left_out": self.left_out,
        }

    def write(self) -> None:
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        whole = self.out.with_suffix(".part")
        whole.write_text(json.dumps(self.result(), indent=1) + "\n")
        whole.replace(self.out)

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        layers = "" if row.layers is None else f"{row.layers:2} layers"
        print(f"{row.name:{WIDTH}} {row.form:6} {layers:9} {_figures(row)}", flush=True)
        if row.fault:
            print(f"    ! {row.fault}", flush=True)
        self.write()

    def add_requests(self, served: Served) -> None:
        self.requests.append(served)
        each = f"{served.seconds_each:.2f} s each" if served.seconds_each else "cut or failed"
        memory = f"planned {served.planned_bytes / 1e9:.2f} GB"
        if served.peak_bytes is not None:
            memory += f", peak {served.peak_bytes / 1e9:.2f} GB"
        told = f"{served.thinking} thinking, {served.drawing} drawing: {each}, {memory}"
        print(f"{served.name:{WIDTH}} {served.form:6} {served.layers:2} layers {told}", flush=True)
        for wrong in (*served.failed, *served.notes):
            print(f"    ! {wrong}", flush=True)
        self.write()

    def add_building(self, built: dict[str, Any]) -> None:
        self.building.append(built)
        held, free = built["held_bytes"], built["free_bytes"]
        memory = f"planned {built['planned_bytes'] / 1e9:.2f} GB"
        memory += "" if held is None else f", held {held / 1e9:.2f} GB"
        memory += "" if free is None else f"; {free / 1e9:.1f} GB were free"
        layers = f"{built['layers']} of {built['of_layers']} layers"
        print(f"{built['form']}: {layers} in {built['seconds']:.1f} s, {memory}", flush=True)
        self.write()

    def add_profile(self, name: str, kernels: list[tuple[str, float, int]]) -> None:
        self.profiles[name] = kernels
        for kernel, milliseconds, times in kernels[:_KERNELS_SHOWN]:
            print(f"    {milliseconds:10.3f} ms {times:5} x {kernel[:80]}", flush=True)
        self.write()

    def leave_out(self, name: str, form: str, why: str) -> None:
        self.left_out.append({"name": name, "form": form, "why": why[:400]})
        print(f"{name:{WIDTH}} {form:6} left out: {why[:120]}", flush=True)
        self.write()


def facts_of_run(scale: Any, minutes: float) -> dict[str, Any]:
    """Return when, where and with which versions it was measured, and how to read it."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware() | {"gpu": _gpu()},
        "versions": versions()
        | {"triton": (installed_version("triton") or "missing"), "cuda": str(torch.version.cuda)},
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "scale": asdict(scale),
        "minutes": minutes,
        "notes": NOTES,
    }


def _figures(row: Row) -> str:
    took = row.timed
    spread = f"{took.least:.3f} to {took.most:.3f}, n {took.runs}" if took.runs > 1 else "once"
    parts = [f"{took.median:10.3f} ms ({spread})"]
    if row.shows_first:
        parts.append(f"first call {took.first_ms:.3f} ms")
    if row.per_layer is not None:
        parts.append(f"{row.per_layer:8.3f} a layer")
    if row.of_floor is not None:
        parts.append(f"{row.of_floor:6.2f} x floor")
    if row.goal:
        parts.append(f"goal {row.goal}")
    if row.gb_s is not None:
        parts.append(f"{row.gb_s:.2f} GB/s")
    if took.peak_bytes:
        parts.append(f"at most {(took.peak_bytes - (took.base_bytes or 0)) / 1e9:.2f} GB")
    return ", ".join(parts)


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return {
        "memory_bytes": torch.cuda.mem_get_info()[1],
        "capability": list(torch.cuda.get_device_capability()),
        "cudnn": torch.backends.cudnn.version(),
    }
