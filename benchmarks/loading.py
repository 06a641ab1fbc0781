"""A checkpoint's loading by this tree and by another one, in turn, its files in the system's cache.

A layer of the model's real width with 24 experts (2.5 GB in bfloat16, four files, random weights)
is loaded in a fresh process each time: as stored, into float32, and with FP8 or NF4 experts. Beside
the seconds stand those of the processors, which other programs disturb less, the bytes read a
second, and how much memory the process took beyond the weights. Ratios are of two runs that
followed each other. The floor: the same files straight into new memory, by as many threads, and
nothing else.

    git worktree add /tmp/before v1.0
    python benchmarks/loading.py --against /tmp/before --out benchmarks/results/loading.json
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
FORMS = {
    "as stored": ("bfloat16", "none"),
    "float32": ("float32", "none"),
    "fp8": ("bfloat16", "fp8"),
    "nf4": ("bfloat16", "nf4"),
}
FLOOR = "floor"
EXPERTS, FILES, READERS = 24, 4, 4


def main() -> None:
    """Measure in fresh processes and write everything as JSON."""
    arguments = _arguments()
    if arguments.child:
        folder, form = arguments.checkpoint, arguments.child
        print(json.dumps(_read(folder) if form == FLOOR else _loaded(folder, *FORMS[form])))
        return
    from hyimg_cli.journal.provenance import hardware, versions

    trees = {"here": HERE} | ({"before": arguments.against} if arguments.against else {})
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.checkpoint or _written(Path(name) / "checkpoint")
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for _ in range(arguments.runs):
            for form in (FLOOR, *arguments.forms):
                for tree, path in trees.items() if form != FLOOR else [("here", HERE)]:
                    found = _in_a_fresh_process(path, folder, form)
                    rows.setdefault(form, {}).setdefault(tree, []).append(found)
                    print(form, tree, found, file=sys.stderr)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": f"a checkpoint of {nbytes / 1e9:.2f} GB in {FILES} files, in the system's cache",
        "hardware": hardware(),
        "versions": versions(),
        "before_over_here": {
            form: {what: _ratio(of, what) for what in ("seconds", "cpu_seconds")}
            for form, of in rows.items() if "before" in of
        },
        "rows": {form: {tree: _row(runs, nbytes) for tree, runs in of.items()}
                 for form, of in rows.items()},
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for form, of in result["rows"].items():
        for tree, row in of.items():
            print(f"{form:10} {tree:7}", {k: v for k, v in row.items() if k != "seconds"})
    for form, ratios in result["before_over_here"].items():
        print(f"{form:10} before / here", ratios)


def _ratio(of: dict[str, list[dict[str, Any]]], what: str) -> dict[str, float]:
    pairs = zip(of["before"], of["here"], strict=True)
    ratios = [round(before[what] / here[what], 2) for before, here in pairs]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _row(runs: list[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    seconds = sorted(run["seconds"] for run in runs)
    return {
        "gb_s": round(nbytes / statistics.median(seconds) / 1e9, 2),
        "gb_s_least_most": [round(nbytes / s / 1e9, 2) for s in (seconds[-1], seconds[0])],
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 2),
        "mb_beyond_weights": max(run["mb_beyond_weights"] for run in runs),
        "sums": sorted({run["sum"] for run in runs}),
        "seconds": [round(s, 3) for s in seconds],
    }


def _in_a_fresh_process(tree: Path, folder: Path, form: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", form, "--checkpoint", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _read(folder: Path) -> dict[str, Any]:
    """All files straight into new memory, a part of each by each thread."""
    started, worked = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(READERS) as readers:
        for path in folder.glob("*.safetensors"):
            descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
            memory = memoryview(mmap.mmap(-1, size))
            for start in range(0, size, size // READERS + 1):
                part = memory[start : start + size // READERS + 1]
                readers.submit(os.preadv, descriptor, [part], start)
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    return {"seconds": seconds, "cpu_seconds": worked, "mb_beyond_weights": 0, "sum": 0}


def _loaded(folder: Path, dtype: str, form: Any) -> dict[str, Any]:
    import torch

    from hyimg_cli.kernels.rows import group_multiple
    from hyimg_cli.models.hunyuan_image3.weights import load

    group_multiple(torch.device("cpu"))  # asked once a process; nothing of it is loading
    before = _anonymous_bytes()
    most, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], _anonymous_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    started, worked = time.perf_counter(), time.process_time()
    network = load(folder, dtype=getattr(torch, dtype), quantization=form)
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    is_over.set()
    watch.join()
    tensors = {t.untyped_storage().data_ptr(): t for t in network.state_dict().values()}
    tensors |= {t.untyped_storage().data_ptr(): t for t in network.buffers()}
    held = sum(t.untyped_storage().nbytes() for t in tensors.values())
    # Equal weights, whoever loaded them.
    total = sum(int(t.view(-1)[:4096].view(torch.uint8).sum()) for t in network.buffers())
    total += sum(int(p.view(-1)[-4096:].view(torch.uint8).sum()) for p in network.parameters())
    beyond = max(most[0], _anonymous_bytes()) - before - held
    return {
        "seconds": seconds,
        "cpu_seconds": worked,
        "mb_beyond_weights": round(beyond / 1e6),
        "sum": total,
    }


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _written(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    from hyimg_cli.models import registry
    from hyimg_cli.models.hunyuan_image3.config import architecture
    from hyimg_cli.models.hunyuan_image3.weights import expected_shapes

    folder.mkdir()
    config = json.loads((registry.resolve_model(registry.EMBEDDED) / "config.json").read_text())
    config |= {
        "hidden_size": 4096, "intermediate_size": 3072, "moe_intermediate_size": [3072],
        "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_head_dim": 128, "head_dim": 128, "num_experts": EXPERTS, "moe_topk": [8],
        "num_shared_expert": [1],
    }  # fmt: skip
    config["vit_aligner"] |= {"n_embed": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    by_file: dict[str, dict[str, torch.Tensor]] = {}
    some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number, (name, shape) in enumerate(expected_shapes(architecture(config)).items()):
        weight_map[name] = f"model-{number % FILES}.safetensors"
        count = torch.Size(shape).numel()
        values = some.repeat(-(-count // len(some)))[:count].view(shape).clone()
        by_file.setdefault(weight_map[name], {})[name] = values
    for file, tensors in by_file.items():
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", type=Path, help="a checkout whose loader is measured, too")
    parser.add_argument("--checkpoint", type=Path, help="one that is there; by default it is made")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--child", choices=(FLOOR, *FORMS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
