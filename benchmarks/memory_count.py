"""What 16 requests at HunyuanImage-3's real size hold, counted without a GPU, beside the plan.

The engine's own code runs on fake tensors: shapes and devices, no numbers, no memory. Counted are
the bytes of tensors alive at once. A GPU takes more: a context, libraries' workspaces, the gaps of
an allocator, the nodes of CUDA graphs. Nothing here is a measurement.

    python benchmarks/memory_count.py                    all 32 layers, experts in FP8; minutes
    python benchmarks/memory_count.py --layers 4         the same of four layers
"""

import argparse
import gc
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from shapes.counted import Bench, Counted
from shapes.fake import fake_gpu
from shapes.network import FORMS
from shapes.scale import REAL

from hyimg_cli.memory.footprint import Together, usable


def main() -> None:
    """Count; a table on stdout, and as JSON where asked."""
    arguments = _arguments()
    rows: list[Counted] = []

    def told(row: Counted) -> None:
        rows.append(row)
        planned, counted = (f"{size / 1e9:8.2f} GB" for size in (row.planned, row.counted))
        print(f"{row.name:44} planned {planned}  counted {counted}  {row.ratio:6.3f}", flush=True)

    with tempfile.TemporaryDirectory() as folder, fake_gpu() as gpu:
        bench = Bench(gpu, Path(folder), REAL, arguments.form, arguments.layers)
        told(bench.weights())
        for row in bench.forwards():
            told(row)
        for by_graphs in (False, True):
            step = bench.decode_step(arguments.requests, by_graphs=by_graphs)
            how = "as a graph keeps it" if by_graphs else "with logits and choice"
            print(f"AR decode, {arguments.requests} rows, {how}: {step / 1e6:.1f} MB counted")
        for drawing in arguments.drawing:
            gc.collect()
            together = Together(arguments.requests, drawing)
            for has_vae in (True, False):
                told(bench.requests(arguments.requests, together, has_vae=has_vae))
        room = usable(int(arguments.memory_gb * 1e9) - bench.weights().planned)
        jobs = [bench.load.request(n, steps=2, guidance=2.5) for n in range(arguments.requests)]
        chosen = bench.needs(jobs).fitting(room, arguments.requests)
    said = f"{chosen.thinking} thinking and {chosen.drawing} drawing"
    print(f"of {arguments.memory_gb} GB the plan would give {said}")
    if arguments.out:
        facts = {"torch": torch.__version__, "layers": arguments.layers, "form": arguments.form}
        facts |= {"rows": [asdict(row) for row in rows], "chosen": asdict(chosen)}
        facts["note"] = "counted on fake tensors without a GPU; not measured"
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=REAL.layers)
    parser.add_argument("--form", choices=FORMS, default="fp8")
    parser.add_argument("--requests", type=int, default=REAL.together)
    parser.add_argument("--drawing", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--memory-gb", type=float, default=149)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
