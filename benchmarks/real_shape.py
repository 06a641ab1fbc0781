"""HunyuanImage-3 at its real size with random weights on one GPU, every part against its floor.

    floors ▸ each format of the experts: as many layers as fit, part by part, then whole requests
    checkpoint, where asked for: a few layers written, read, loaded, run with and without prewarm

Weights are drawn on the GPU; no checkpoint is read. The floors, a product and a copy, are measured
in the same run. The most important rows come first. Each is written to the result at once; rows for
which there is no time are listed as left out. Random weights route nearly evenly, so one row is
skewed. The benchmark says nothing about pictures.

Predicted for one H200, not measured: counted bytes and FLOP over 0.8, which kernels reach, times
the runs below. A text is 450 tokens, decoded by CUDA graphs as in the command: 5 ms each for one
row, 27 for 16. Without graphs the host is the limit: a third of a millisecond a layer.

    imports, floors, the first compilation of every kernel     0.5 minutes, imports before the clock
    FP8: 32 layers built (10 s; 77 GB in 8 bits), measured     2, a third of it the VAE
    1 request: 50 steps 19 s, 8 steps 5 s, no graphs 8 s       0.5
    16 requests, 8 steps: 12 s of 49 are text                  0.8
    16 requests, 50 steps with CFG: 17 s each                  4.6, or as many steps as are left
    dense: 22 layers built (10 s) and measured                 1.5, 2 in a separate run
    checkpoint: 4 layers, 29 GB                                4

Two formats in one run share the time equally, and the first one takes the requests. A fault of the
GPU itself (an illegal address) ends everything after it in the same process. With two runs,
`--forms fp8` and `--forms dense`, one format survives a fault of the other. Without `--out`, the
result is `real-shape.json` in the folder that the variable OUT names, if it is set.

    python benchmarks/real_shape.py --forms fp8 --minutes 9
    python benchmarks/real_shape.py --only 'VAE*' --out NEW.json          some rows
    python benchmarks/real_shape.py --compare OLD.json NEW.json           measures nothing
    python benchmarks/real_shape.py --parts checkpoint --minutes 5
    python benchmarks/real_shape.py --scale tiny --layers 2 --minutes 1   the same code anywhere
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from random_network import FORMS, build, quantization_of
from shapes import checkpoint, serving
from shapes.cases import ANY_FORM, Group, Subject
from shapes.compare import compared
from shapes.floors import Floors, floors
from shapes.kept import Kept, facts_of_run
from shapes.network import layers_that_fit
from shapes.rows import Bench, groups
from shapes.run import PARTS, Run, said
from shapes.timing import Deadline, let_go
from workload import SCALES, Workload, workload

from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3


def main() -> None:
    """Measure, or compare two results; a table on stdout, everything as JSON in the result."""
    arguments = _arguments()
    if arguments.compare:
        old, new = (json.loads(path.read_text()) for path in arguments.compare)
        print("\n".join(compared(old, new)))
    else:
        _measure(arguments)


def _measure(arguments: argparse.Namespace) -> None:
    deadline = Deadline(60 * arguments.minutes)
    has_gpu = torch.cuda.is_available()
    if arguments.scale.name == "real" and not has_gpu:
        raise SystemExit("no GPU: --scale tiny runs the same code on a CPU, and measures nothing")
    device = torch.device("cuda:0" if has_gpu else "cpu")
    torch.manual_seed(0)
    kept = Kept(arguments.out, facts_of_run(arguments.scale, arguments.minutes))
    kept.write()
    whole = Run(arguments, device, deadline, kept)
    forms = arguments.forms if {"rows", "requests"} & set(arguments.parts) else ()
    parts = [partial(_one_form, form) for form in forms]
    parts += [_checkpoint] if "checkpoint" in arguments.parts else []
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            part(Path(folder), whole.share(len(parts) - number))
            # After the call, which no longer holds the network.
            let_go()
    kept.facts["spent_s"] = round(deadline.spent_s, 1)
    kept.write()


def _one_form(form: str, folder: Path, run: Run) -> None:
    """Measure a network and its rows, and with the first format whole requests; then free it."""
    asked, kept = run.asked, run.kept
    try:
        load = _workload(folder / form, run, asked.layers or asked.scale.layers)
        rows, requests = _wanted_rows(load, run), _wanted_requests(form, run)
        if not rows and not requests:
            return
        load, free = _fitting(load, form, folder / f"{form}-fewer", run)
        measured = _floors(load, run)
        model = _built(form, load, free, run)
    except Exception as error:
        kept.leave_out("everything", form, f"not built: {said(error)}")
        return
    layers, scale = load.arch.num_hidden_layers, asked.scale
    subject = Subject(form, layers, measured, layers == scale.layers, scale.name == "real")
    bench = Bench(model, load, subject)
    for group in rows:
        of = subject.apart if group.is_apart else subject
        run.rows(group.names, partial(group.cases, bench), of)
    try:
        if requests:
            serving.serve_all(requests, model, load, subject, run)
    except Exception as error:
        kept.leave_out("requests", form, said(error))


def _wanted_rows(load: Workload, run: Run) -> list[Group]:
    """Return the requested groups; without layers to run, only the ones not measured yet."""
    if "rows" not in run.asked.parts:
        return []
    there = {row.name for row in run.kept.rows if row.form == ANY_FORM}
    cut = [replace(g, names=run.wanted(g.names)) for g in groups(load)]
    cut = [replace(g, names=tuple(n for n in g.names if n not in there)) for g in cut]
    return [group for group in cut if group.names]


def _wanted_requests(form: str, run: Run) -> tuple[str, ...]:
    """Return the whole requests, which run on the first format's network."""
    asked = run.asked
    wanted = run.wanted(serving.names(asked.scale)) if "requests" in asked.parts else ()
    if wanted and form != asked.forms[0]:
        run.kept.leave_out("requests", form, f"those of {asked.forms[0]} are enough")
        return ()
    return wanted


def _workload(folder: Path, run: Run, layers: int) -> Workload:
    folder.mkdir()
    return workload(folder, run.asked.scale, layers)


def _fitting(load: Workload, form: str, folder: Path, run: Run) -> tuple[Workload, float | None]:
    """Return the workload with as many layers as fit in memory, and that memory."""
    free = run.asked.memory_gb and 1e9 * run.asked.memory_gb
    if free is None and run.device.type == "cuda":
        let_go()
        free = torch.cuda.mem_get_info(run.device)[0]
    if free is None:
        return load, None
    fits = layers_that_fit(load, form, free)
    if fits < load.arch.num_hidden_layers:
        load = _workload(folder, run, fits)
    return load, free


def _floors(load: Workload, run: Run) -> Floors:
    facts = run.kept.facts
    if "floors" not in facts:
        facts["floors"] = asdict(floors(load.arch, load.scale, run.device, _dtype(run)))
        let_go()
    return Floors(**facts["floors"])


def _built(form: str, load: Workload, free: float | None, run: Run) -> HunyuanImage3:
    device, dtype, started = run.device, _dtype(run), time.perf_counter()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    network = build(load.arch, form, device, dtype)
    held = None
    if before is not None:
        torch.cuda.synchronize(device)
        let_go()
        held = torch.cuda.memory_allocated(device) - before
    name = str(dtype).removeprefix("torch.")
    run.kept.add_building(
        {
            "form": form,
            "layers": load.arch.num_hidden_layers,
            "of_layers": load.scale.layers,
            "free_bytes": free,
            "seconds": round(time.perf_counter() - started, 2),
            "held_bytes": held,
            "planned_bytes": load.prompter.card.loaded_bytes(name, quantization_of(form)),
            "prefix": load.layout.live_start,
            "live": load.live,
        }
    )
    return HunyuanImage3(network, load.prompter)


def _dtype(run: Run) -> torch.dtype:
    return torch.bfloat16 if run.device.type == "cuda" else torch.float32


def _checkpoint(folder: Path, run: Run) -> None:
    place = run.asked.checkpoint or folder / "checkpoint"
    place.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint.measure(place, run)
    except Exception as error:
        run.kept.leave_out("checkpoint", ANY_FORM, said(error))


def _own_out() -> Path | None:
    """Return where a lent machine keeps results: what is elsewhere on it is lost."""
    kept = os.environ.get("OUT")
    return Path(kept) / "real-shape.json" if kept else None


def _chosen(given: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    chosen = tuple(given.split(","))
    if unknown := set(chosen) - set(known):
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--scale", choices=sorted(SCALES), default="real")
    add("--layers", type=int, help="fewer layers than the network has, or than fit")
    add("--minutes", type=float, default=9.0, help="for everything, building too")
    add("--forms", default="fp8,dense", help="fp8, dense, or both, in that order")
    add("--parts", default="rows,requests", help="of rows, requests, checkpoint")
    add("--only", nargs="+", default=["*"], help="names of rows, with * for any letters")
    add("--profile", action="store_true", help="of every row, not of misses alone")
    add("--memory-gb", type=float, help="count layers by so much memory, not by what is free")
    add("--checkpoint", type=Path, help="folder where the checkpoint is written, and stays")
    add("--out", type=Path, default=_own_out(), help="the result as JSON; see above")
    add("--compare", type=Path, nargs=2, help="an old and a new result; nothing is measured")
    given = parser.parse_args()
    given.scale = SCALES[given.scale]
    given.forms = _chosen(given.forms, FORMS, "format")
    given.parts = _chosen(given.parts, PARTS, "part")
    return given


if __name__ == "__main__":
    main()
