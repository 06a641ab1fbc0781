"""HunyuanImage-3 at its real size with random weights on one GPU, every part against its floor.

    floors ▸ dense layers, as many as fit ▸ all layers with experts in FP8 ▸ whole requests

Weights are drawn on the GPU; no checkpoint is read. The floors, a product and a copy, are measured
in the same run. Rows come in the order of what matters, each is written to the result as soon as it
is there, and what the time does not allow is named as left out. Random weights route nearly evenly,
so one row is skewed. Nothing is said about pictures.

Predicted for one H200, not measured: `roofline.py`'s counts over 0.8 for what kernels reach, times
the runs below. Text is 450 tokens, by CUDA graphs as the command decodes it: 5 ms each for one row,
27 for 16. Without graphs the host is what counts, a third of a millisecond a layer.

    imports, floors, the first compilation of every kernel     0.5 minutes, imports before the clock
    dense: 23 layers built (10 s) and measured                 1
    FP8: 32 layers built (10 s; 77 GB in 8 bits)               1
    1 request: 50 steps 19 s, 8 steps 5 s, no graphs 8 s       0.5
    16 requests, 8 steps: 12 s of 49 are text                  0.8
    16 requests, 50 steps with CFG: 17 s each                  4.6, or as many steps as are left

A fault of the GPU itself (an illegal address) ends all that comes behind it in the same process:
with `--forms dense` and `--forms fp8` in two runs, each with its own `--out`, one form outlives the
other.

    python benchmarks/real_shape.py --minutes 9
    python benchmarks/real_shape.py --only '16 requests*' --forms fp8     the rest, in another run
    python benchmarks/real_shape.py --scale tiny --layers 2 --minutes 1   the same code anywhere
"""

import argparse
import gc
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from shapes.floors import Floors, floors
from shapes.network import FORMS, build, layers_that_fit, quantization_of
from shapes.requests import Requests, Served, serve
from shapes.rows import Bench, Case, Row, graphs_of
from shapes.scale import SCALES, Scale, Workload, workload
from shapes.timing import Deadline, profiled, timed

from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3

RESULTS = Path(__file__).parent / "results"
NOTES = (
    "random weights: routing is nearly even, except in the skewed row; no picture means anything",
    "milliseconds are medians; a row's warm-up is apart; spread is least and most",
    "per_layer divides a call's time by the network's layers; of_32_layers is 32 times that, "
    "measured as it is only where is_whole",
    "floor: the larger of FLOP at the measured product's speed and bytes at the measured copy's",
    "rows called graph use CUDA graphs, and so do requests unless they say otherwise: the default",
)
# Seconds that the steps around a case, and writing, may take.
_LEAST_LEFT_S = 5.0


@dataclass
class Kept:
    """Everything measured so far, on disk as soon as it is there."""

    out: Path | None
    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    requests: list[Served] = field(default_factory=list)
    building: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, list[tuple[str, float, int]]] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def keep(self) -> None:
        if self.out is None:
            return
        result = self.facts | {
            "building": self.building,
            "rows": [asdict(row) for row in self.rows],
            "requests": [asdict(served) for served in self.requests],
            "profiles": self.profiles,
            "left_out": self.left_out,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        whole = self.out.with_suffix(".part")
        whole.write_text(json.dumps(result, indent=1) + "\n")
        whole.replace(self.out)

    def leave_out(self, name: str, form: str, why: str) -> None:
        self.left_out.append({"name": name, "form": form, "why": why[:400]})
        print(f"{name:44} {form:6} left out: {why[:120]}", flush=True)
        self.keep()


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    scale: Scale
    layers: int
    forms: tuple[str, ...]
    only: tuple[str, ...]
    row_seconds: float
    most_runs: int
    profiles_all: bool

    def wants(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.only)


def main() -> None:
    """Measure; a table on stdout, everything as JSON in the result."""
    arguments = _arguments()
    deadline = Deadline(60 * arguments.minutes)
    settings = _settings(arguments)
    has_gpu = torch.cuda.is_available()
    if settings.scale.name == "real" and not has_gpu:
        raise SystemExit("no GPU: --scale tiny runs the same code on a CPU, and measures nothing")
    device = torch.device("cuda:0" if has_gpu else "cpu")
    torch.manual_seed(0)
    kept = Kept(_out(arguments, device), _facts(settings, arguments.minutes))
    kept.keep()
    with tempfile.TemporaryDirectory() as folder:
        for form in settings.forms:
            _one_form(form, Path(folder), settings, device, deadline, kept)
            # Behind the call: nothing of it holds the network any more.
            _let_go()
    kept.facts["spent_s"] = round(deadline.spent_s, 1)
    kept.keep()


def _one_form(
    form: str,
    folder: Path,
    settings: Settings,
    device: torch.device,
    deadline: Deadline,
    kept: Kept,
) -> None:
    """Floors where they are not there yet, a network, its rows, its requests; then all is let
    go.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        load = _workload(form, folder, settings, device)
        found = kept.facts.get("floors")
        measured = Floors(**found) if found else floors(load.arch, settings.scale, device, dtype)
        kept.facts["floors"] = asdict(measured)
        model = _built(form, load, device, dtype, kept)
    except Exception as error:
        kept.leave_out("everything", form, f"not built: {error}")
        return
    layers = load.arch.num_hidden_layers
    bench = Bench(model, load, form, measured, is_whole=layers == settings.scale.layers)
    for group in bench.cases():
        _rows(group, bench, settings, deadline, kept)
    if layers == settings.layers and form == settings.forms[-1]:
        _requests(model, load, form, settings, deadline, kept)
    else:
        why = "only the last format's network, with all layers, takes whole requests"
        kept.leave_out("requests", form, why)


def _rows(
    group: Callable[[], Any], bench: Bench, settings: Settings, deadline: Deadline, kept: Kept
) -> None:
    """Every case of a group; one that fails, by its own fault or for memory, leaves the others."""
    name = str(getattr(group, "__name__", getattr(group, "func", group)))
    if deadline.left_s < _LEAST_LEFT_S:
        kept.leave_out(name, bench.form, "out of time")
        return
    try:
        for case in group():
            name = case.name
            if settings.wants(name):
                _row(case, bench, settings, deadline, kept)
    except Exception as error:
        kept.leave_out(name, bench.form, f"{type(error).__name__}: {error}")
    _let_go()


def _row(case: Case, bench: Bench, settings: Settings, deadline: Deadline, kept: Kept) -> None:
    if deadline.left_s < _LEAST_LEFT_S:
        kept.leave_out(case.name, bench.form, "out of time")
        return
    seconds = min(settings.row_seconds, deadline.left_s / 4)
    took = timed(case.call, bench.device, seconds=seconds, most_runs=settings.most_runs)
    row = bench.row(case, took)
    kept.rows.append(row)
    _show(row)
    kept.keep()
    if row.misses_goal or settings.profiles_all:
        _profile(case, bench, kept)


def _profile(case: Case, bench: Bench, kept: Kept) -> None:
    """Where a case's time goes; a machine that does not let itself be looked into loses no row."""
    try:
        kept.profiles[f"{case.name}, {bench.form}"] = profiled(case.call, bench.device)
    except Exception as error:
        kept.leave_out(f"profile of {case.name}", bench.form, f"{type(error).__name__}: {error}")
    kept.keep()


def _requests(
    model: HunyuanImage3,
    load: Workload,
    form: str,
    settings: Settings,
    deadline: Deadline,
    kept: Kept,
) -> None:
    """One request, then several together; the last with as many steps as the time allows."""
    scale = settings.scale
    plan = [
        Requests(1, scale.steps, 2.5),
        Requests(1, scale.fast_steps, 1.0),
        Requests(1, scale.fast_steps, 1.0, uses_graphs=False),
        Requests(scale.together, scale.fast_steps, 1.0),
        Requests(scale.together, scale.steps, 2.5),
    ]
    # Captured once: later requests find the graphs of earlier ones.
    graphs = graphs_of(model.network, form)
    by_graphs = HunyuanImage3(model.network, load.prompter, graphs=graphs)
    done: list[Served] = []
    for requests in plan:
        if not settings.wants(requests.name):
            continue
        if deadline.left_s < _LEAST_LEFT_S:
            kept.leave_out(requests.name, form, "out of time")
            continue
        allowed = _affordable(requests, done, deadline)
        if allowed < requests.steps:
            why = f"time for {allowed} of {requests.steps} steps"
            kept.leave_out(requests.name, form, why)
            if allowed < 2:
                continue
            requests = replace(requests, steps=allowed)
        try:
            used = by_graphs if requests.uses_graphs else model
            served = serve(requests, used, load, form, deadline)
        except Exception as error:
            kept.leave_out(requests.name, form, f"{type(error).__name__}: {error}")
            continue
        done.append(served)
        kept.requests.append(served)
        _show_served(served)
        kept.keep()
        _let_go()


def _affordable(requests: Requests, done: Sequence[Served], deadline: Deadline) -> int:
    """Denoise steps for which time is left, judged by what one request and many have taken."""
    alone = [s for s in done if s.name.startswith("1 request,") and s.seconds_each]
    many = [s for s in done if not s.name.startswith("1 request,") and s.seconds_each]
    if requests.count == 1 or not alone or not many:
        return requests.steps
    denoise = sum(alone[0].phases_s.get(name, 0.0) for name in ("denoise_first", "denoise_rest"))
    steps = alone[0].events["DenoiseStep"]
    per_step = requests.count * denoise / max(1, steps)
    return min(requests.steps, math.floor((0.9 * deadline.left_s - many[0].seconds) / per_step))


def _workload(form: str, folder: Path, settings: Settings, device: torch.device) -> Workload:
    layers = settings.layers
    own = folder / form
    own.mkdir()
    load = workload(own, settings.scale, layers)
    if form == "dense":
        fits = layers_that_fit(load.arch, device, layers)
        if fits < layers:
            fewer = folder / f"{form}-{fits}"
            fewer.mkdir()
            load = workload(fewer, settings.scale, fits)
    return load


def _built(
    form: str, load: Workload, device: torch.device, dtype: torch.dtype, kept: Kept
) -> HunyuanImage3:
    started = time.perf_counter()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    network = build(load.arch, form, device, dtype)
    held = None
    if before is not None:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(device) - before
    card = load.prompter.card
    name = str(dtype).removeprefix("torch.")
    kept.building.append(
        {
            "form": form,
            "layers": load.arch.num_hidden_layers,
            "seconds": round(time.perf_counter() - started, 2),
            "held_bytes": held,
            "planned_bytes": card.loaded_bytes(name, quantization_of(form)),
            "prefix": load.layout.live_start,
            "live": load.live,
        }
    )
    kept.keep()
    return HunyuanImage3(network, load.prompter)


def _let_go() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _show(row: Row) -> None:
    took = row.timed
    spread = f"{took.median:10.3f} ms ({took.least:.3f} to {took.most:.3f}, n {took.runs})"
    layer = ""
    if row.per_layer is not None:
        layer = f" {row.per_layer:8.3f} a layer, {row.of_floor:6.2f} x floor"
        layer += f", goal {row.goal}" if row.goal else ""
    peak = f" {(took.peak_bytes - (took.base_bytes or 0)) / 1e9:6.2f} GB" if took.peak_bytes else ""
    print(f"{row.name:44} {row.form:6} {row.layers:2} layers {spread}{layer}{peak}", flush=True)


def _show_served(served: Served) -> None:
    each = f"{served.seconds_each:.2f} s each" if served.seconds_each else "cut or failed"
    memory = f"planned {served.planned_bytes / 1e9:.2f} GB"
    if served.peak_bytes is not None:
        memory += f", peak {served.peak_bytes / 1e9:.2f} GB"
    told = f"{served.thinking} thinking, {served.drawing} drawing: {each}, {memory}"
    print(f"{served.name:44} {served.form:6} {told}", flush=True)


def _facts(settings: Settings, minutes: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions() | {"triton": _version("triton"), "cuda": str(torch.version.cuda)},
        "scale": asdict(settings.scale),
        "minutes": minutes,
        "notes": NOTES,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _out(arguments: argparse.Namespace, device: torch.device) -> Path | None:
    if arguments.out is not None or device.type != "cuda":
        out: Path | None = arguments.out
        return out
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return RESULTS / f"real-shape-{name}.json"


def _settings(arguments: argparse.Namespace) -> Settings:
    scale = SCALES[arguments.scale]
    forms = tuple(arguments.forms.split(","))
    if unknown := set(forms) - set(FORMS):
        raise SystemExit(f"unknown formats {sorted(unknown)}; known: {', '.join(FORMS)}")
    is_real = scale.name == "real"
    return Settings(
        scale=scale,
        layers=arguments.layers or scale.layers,
        forms=forms,
        only=tuple(arguments.only or ["*"]),
        row_seconds=2.0 if is_real else 0.02,
        most_runs=20 if is_real else 3,
        profiles_all=arguments.profile,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=sorted(SCALES), default="real")
    parser.add_argument("--layers", type=int, help="fewer layers than the network has")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, building too")
    parser.add_argument("--forms", default="dense,fp8", help="dense, fp8, or both")
    parser.add_argument("--only", nargs="+", help="names of rows, with * for any letters")
    parser.add_argument("--profile", action="store_true", help="of every row, not of misses alone")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
