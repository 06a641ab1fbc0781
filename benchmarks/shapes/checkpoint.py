"""A checkpoint of a few layers at the model's real width, with random weights.

It is written, read, loaded, and run by the command itself:

    written    a network's tensors, a shard a layer
    read       one shard that is not in the system's cache: the disk
    copied     main memory to the GPU, pageable and pinned: what may limit loading
    loaded     by the product's own loader, with the files in the system's cache
    16 jobs    `hyimg generate` in its own process, with and without prewarming
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from random_network import FORMS, build, quantization_of
from safetensors.torch import save_file
from torch import Tensor
from workload import Scale, Workload, source, workload

import hyimg_cli
from hyimg_cli.loading.checkpoint import INDEX_FILE, weight_files
from hyimg_cli.manifest.resolved import lines_beside
from hyimg_cli.media.formats import encode
from hyimg_cli.models import registry
from hyimg_cli.settings.run import ModelChoice
from shapes.cases import ANY_FORM, Case, Subject
from shapes.run import Run, said
from shapes.timing import Pace, let_go, taken

LAYERS = 4
JOBS = "jobs.jsonl"
WRITTEN, READ = "checkpoint written", "checkpoint read from disk"
_COPIES = ("copy to the GPU, pageable", "copy to the GPU, pinned")
# The format that users with one GPU run.
_FORM = "fp8"
_PACE = Pace(warmups=0, least=1, most=2)
_BLOCK, _COPIED = 1 << 24, 1 << 30
# Bytes per second at which files are certainly written.
_LEAST_RATE = 5e8
# Keys of a run's summary, with and without prewarming.
_PARTS = {True: ("load", "prewarm", "pictures"), False: ("load", "pictures")}


def names(scale: Scale, device: torch.device) -> tuple[str, ...]:
    """Return the names of all rows, in the order in which they are measured."""
    loads = (f"checkpoint loaded, {form}" for form in FORMS)
    runs = (name for prewarms in _PARTS for name in run_names(scale, prewarms=prewarms).values())
    copies = _COPIES if device.type == "cuda" else ()
    return (WRITTEN, *loads, *runs, READ, *copies)


def run_names(scale: Scale, *, prewarms: bool) -> dict[str, str]:
    """Return the names of one run's rows, by part of the run."""
    how = f"{scale.together} jobs, {'' if prewarms else 'not '}prewarmed"
    return {part: f"{how}: {part}" for part in _PARTS[prewarms]}


def measure(folder: Path, run: Run) -> None:
    """Measure every requested row; the checkpoint stays in `folder`."""
    scale = run.asked.scale
    wanted = run.wanted(names(scale, run.device))
    if not wanted:
        return
    load = workload(folder, scale, run.asked.layers or LAYERS)
    found, subject = Checkpoint(load, run.device), Subject(ANY_FORM, load.arch.num_hidden_layers)
    is_late = run.deadline.left_s < found.nbytes / _LEAST_RATE
    if not is_late:
        run.rows((WRITTEN,), found.writing, subject)
    left = [name for name in wanted if is_late or name != WRITTEN]
    if not any(row.name == WRITTEN for row in run.kept.rows):
        for name in left:
            why = "out of time" if is_late else "there is no checkpoint"
            run.kept.leave_out(name, ANY_FORM, why)
        return
    run.rows([name for name in left if name.startswith("checkpoint loaded")], found.loads, subject)
    for prewarms in _PARTS:
        if set(run_names(scale, prewarms=prewarms).values()) & set(left):
            _run(found, subject, run, prewarms=prewarms)
    run.rows([name for name in left if name in (READ, *_COPIES)], found.floors, subject)


def _run(found: "Checkpoint", subject: Subject, run: Run, *, prewarms: bool) -> None:
    named = run_names(run.asked.scale, prewarms=prewarms)
    try:
        seconds, fault = found.run(prewarms=prewarms, seconds=max(1.0, run.deadline.left_s))
    except Exception as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        for name in named.values():
            run.kept.leave_out(name, ANY_FORM, "out of time" if is_late else said(error))
        return
    for part, name in named.items():
        is_load = part == "load"
        moved, note = (found.nbytes, "with what is imported for it") if is_load else (None, "")
        case = Case(name, lambda: None, moved=moved, note=note, fault=fault)
        run.kept.add_row(subject.row(case, taken(seconds[part])))


class Checkpoint:
    """A checkpoint on disk, next to the small files that its workload has written."""

    def __init__(self, load: Workload, device: torch.device) -> None:
        self._load, self._device = load, device
        self._folder = load.prompter.folder
        # Experts and most weights in 16 bits, wide ones in 32.
        self.nbytes = load.prompter.card.loaded_bytes("bfloat16")

    def writing(self) -> Iterator[Case]:
        """Write weights to files, which the system may still buffer, and a manifest of edits."""
        _refuse_unfit(self._folder, self.nbytes)
        size = f"{self.nbytes / 1e9:.2f} GB, {self._load.arch.num_hidden_layers} layers"
        once = Pace(warmups=0, least=1, most=1)
        self._write_jobs()
        yield Case(WRITTEN, self._write, moved=self.nbytes, pace=once, note=size)

    def loads(self) -> Iterator[Case]:
        """Load with the product's own loader."""
        for form in FORMS:
            name, call = f"checkpoint loaded, {form}", partial(self._loaded, form)
            note = "files in the system's cache"
            yield Case(name, call, moved=self.nbytes, pace=_PACE, note=note)

    def floors(self) -> Iterator[Case]:
        """Measure what may limit loading."""
        largest = max(weight_files(self._folder), key=lambda path: path.stat().st_size)
        size = largest.stat().st_size
        _flush(largest)
        yield Case(
            READ, partial(_read, largest), moved=size, pace=_PACE, note=f"{size / 1e9:.2f} GB"
        )
        if self._device.type == "cuda":
            for name, is_pinned in zip(_COPIES, (False, True), strict=True):
                held = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=is_pinned)
                yield Case(name, partial(held.to, self._device), moved=_COPIED)

    def _write(self) -> None:
        """Write weights, a shard a layer, and a manifest of edits."""
        tensors = build(self._load.arch, "dense", self._device, torch.bfloat16).state_dict()
        shards: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            shards[_shard(name)][name] = tensor
        for file, held in shards.items():
            save_file(held, self._folder / file)
        placed = {name: file for file, held in shards.items() for name in held}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": placed}
        (self._folder / INDEX_FILE).write_text(json.dumps(index))

    def _write_jobs(self) -> None:
        """Write a manifest of as many edits as work together, each of its own picture."""
        load, scale = self._load, self._load.scale
        jobs = []
        for number in range(scale.together):
            path = self._folder / f"source-{number}.png"
            path.write_bytes(encode(source(path.name, scale.size).pixels))
            job = load.request(number, steps=scale.fast_steps, guidance=1.0)
            jobs.append(replace(job, images=(str(path),)))
        lines = (json.dumps(line) + "\n" for line in lines_beside(jobs, self._folder))
        (self._folder / JOBS).write_text("".join(lines))

    def run(self, *, prewarms: bool, seconds: float) -> tuple[dict[str, float], str]:
        """Return seconds by part of `hyimg generate` in its own process, and any fault.

        From its own summary. Raises TimeoutExpired, and RuntimeError without a summary.
        """
        flag = "--prewarm" if prewarms else "--no-prewarm"
        device = "cpu" if self._device.type == "cpu" else "cuda:0"
        command = [sys.executable, "-m", "hyimg_cli", "generate", str(self._folder / JOBS)]
        command += ["--device", device, "--quantization", _FORM, flag]
        command += ["--json", "--progress", "none", "--no-report", "--no-disk-cache"]
        root = str(Path(hyimg_cli.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [*command, "-o", out],
                capture_output=True,
                text=True,
                timeout=seconds,
                env=os.environ | {"PYTHONPATH": path},
                check=False,
            )
        return _told(done, prewarms=prewarms)

    def _loaded(self, form: str) -> None:
        choice = ModelChoice(
            model=str(self._folder), device=self._device.type, quantization=quantization_of(form)
        )
        let_go()
        registry.load(choice, is_batch_invariant=False)


def _told(
    done: subprocess.CompletedProcess[str], *, prewarms: bool
) -> tuple[dict[str, float], str]:
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    summary = next((line["summary"] for line in lines if "summary" in line), None)
    if summary is None:
        raise RuntimeError(" ".join(done.stderr.split())[-300:])
    failed = [line["error"]["message"] for line in lines if line.get("status") == "failed"]
    fault = f"{len(failed)} failed: {failed[0]}" if failed else ""
    return {part: summary[f"{part}_s"] for part in _PARTS[prewarms]}, fault


def _refuse_unfit(folder: Path, nbytes: int) -> None:
    if list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds a checkpoint already")
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ValueError(f"{nbytes / 1e9:.1f} GB; {free / 1e9:.1f} GB are free on the disk")


def _shard(name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return f"model-layer-{layer[1]}.safetensors" if layer else "model-around.safetensors"


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Read from the disk: the system's cached copy of the file is dropped first."""
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.readinto(block):
            pass
