"""Measure what reusing the AR stage's K/V saves.

By count for the released model, by clock for the embedded one, and the pixels that inexact reuse
changes.

    python benchmarks/kv_reuse.py count --steps 8 --sources 3      one case, counted
    python benchmarks/kv_reuse.py clock --steps 8 --batch 4        one case, timed
    python benchmarks/kv_reuse.py planted                          faults in the reuse, in dB
    python benchmarks/kv_reuse.py all --out results/NAME.json      every case of kv-reuse.md
        --cases 3                     time at most 3 cases that the file lacks, and stop

Counted: FLOP of the transformer in the diffusion stage. The VAE, the vision encoder, the
convolutions around the transformer and the AR stage are the same in every variant, and left out.
Timed: processor seconds of whole runs by the harness of `hyimg bench`, one thread.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measure.bench import faults
from released import SMALL, released
from shapes.floors import work

from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench.harness import Bench
from hyimg_cli.measure.bench.scenario import SCENARIOS, Scenario, read_scenario
from hyimg_cli.measure.bench.verdict import Findings, spread_of
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.quality.metrics import PIXEL_METRICS

ARCH = architecture(released(json.loads((SMALL / "config.json").read_text())))
CASES = json.loads(Path(__file__).with_name("kv_reuse_cases.json").read_text())
STEPS = (1, 2, 4, 8, 12, 20, 30, 50, 100)
# Tokens of the system prompt `en_unified`, estimated from its 5,673 characters; of tags and roles
# before and after a job's own text; of markers and the vision encoder's rows of a source.
SYSTEM, BEFORE, BEHIND, AROUND_SOURCE = 1150, 4, 11, 1030
# Tokens after the text: its closing tag and the start of the picture, which the AR stage did not
# process.
UNFED = 5
KV_BYTES = 4 * ARCH.num_key_value_heads * ARCH.head_dim * ARCH.num_hidden_layers


@dataclass(frozen=True)
class Case:
    """Edits that run together: `batch` prompts, with `seeds` pictures for each one's text.

    `prompt` and `think` are tokens; without thinking, the AR stage only chooses the size. Sources
    have the picture's size.
    """

    steps: int = 50
    width: int = 1216
    height: int = 832
    sources: int = 1
    prompt: int = 50
    think: int = 450
    batch: int = 1
    seeds: int = 1


def flops(rows: int, seen: int) -> float:
    """Return the FLOP of all layers for `rows` causal tokens of a sequence, after `seen` others.

    Source images see all of themselves, which is less than 1 % of a prefix more.
    """
    pairs = rows * seen + rows * (rows + 1) // 2
    one = work(ARCH, "dense", rows=rows, pairs=pairs, kv_slots=0, experts_read=0, width_bytes=2)
    return ARCH.num_hidden_layers * (one.flops + one.expert_flops)


def count(case: Case) -> dict[str, Any]:
    """Return PFLOP of the diffusion stage by variant, and the part that reuse saves."""
    cells, pictures = case.width * case.height // 256, case.batch * case.seeds
    shared = SYSTEM + BEFORE + case.sources * (cells + AROUND_SOURCE)
    prefix, live = shared + case.prompt + case.think + BEHIND, cells + 1
    # In a picture every token sees every other: nearly twice as many pairs as causal ones.
    step = 2 * (flops(live, prefix) + flops(live, 0) - live * flops(1, 0))
    unfed, whole = UNFED if case.think else 1, 2 * flops(prefix, 0)
    # The negative branch shares everything before the prompt with the positive one. After the first
    # picture of a text, only the last token of each branch is computed.
    first = flops(unfed, prefix - unfed) + flops(prefix - shared, shared)
    reused = case.batch * (first + (case.seeds - 1) * 2 * flops(1, prefix - 1))
    found = [reused, pictures * whole, pictures * case.steps * whole]
    found = [of + pictures * case.steps * step for of in found]
    return {
        "prefix_tokens": prefix,
        "pflop": [of / 1e15 for of in found],
        "saved_of_once": 1 - found[0] / found[1],
        "over_once": found[1] / found[0],
        "over_every": found[2] / found[0],
        "kv_bytes_while_drawing": 2 * pictures * (prefix + live) * KV_BYTES,
    }


def clock(case: Case) -> dict[str, Any]:
    """Return processor seconds of a run by variant on the embedded model, and its rows."""
    common = {"batching_max_size": 16, "prefix_cache_mb": 512 if case.seeds > 1 else 0}
    scenario = replace(read_scenario("kv-reuse"), common=common, repeats=5)
    scenario = replace(scenario, steps=(case.steps,), main_steps=case.steps)
    found = _compared(scenario, "".join(_lines(case)))
    (once,), (every,), _ = (one.timed for one in found.comparisons)
    runs = dict(zip(scenario.labels, (once.a, once.b, every.b), strict=True))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "verdict": found.verdict.name,
        "processor_s": {name: spread_of([run.wall_s for run in of]) for name, of in runs.items()},
        "over_once": once.speedup,
        "over_every": every.speedup,
        "rows": {name: dict(of[0].rows) for name, of in runs.items()},
    }


def planted() -> dict[str, Any]:
    """Return, by fault in reuse, its pictures' distance from recompute once: the worst of four."""
    scenario = replace(read_scenario("kv-reuse").pairs[0], steps=(8,), repeats=1)
    found = {}
    for name, fault in CASES["planted"].items():
        with pytest.MonkeyPatch.context() as patch:
            getattr(faults, fault, str)(patch)
            result = _compared(scenario)
        found[name] = result.worst.pairs[8].worst() | {"verdict": result.verdict.name}
    return found | {"another seed": result.worst.other_seed.worst()}


def _compared(scenario: Scenario, lines: str = "") -> Findings:
    """Return a comparison of the scenario's jobs, or of these lines."""
    with tempfile.TemporaryDirectory() as name:
        manifest = Path(name) / "jobs.jsonl" if lines else scenario.manifest
        if lines:
            manifest.write_text(lines)
        rest = {"folder": Path(name), "metrics": tuple(PIXEL_METRICS.values()), "tell": str}
        return Bench(scenario, read_manifest(manifest), {"device": "cpu"}, **rest).run()


def _lines(case: Case) -> Iterator[str]:
    """Yield the case's lines in the embedded model's one size; text lengths are its own."""
    images = [str(SCENARIOS / "images" / f"{one}.png") for one in ("red-circle", "yellow-square")]
    words = ("make", "the", "circle", "blue", "and", "keep", "all", "else", "as", "it", "is")
    prompt = " ".join((words * case.prompt)[: case.prompt])
    for number in range(case.batch):
        line = {"custom_id": f"edit-{number}", "prompt": f"{prompt} {number}", "n": case.seeds}
        line |= {"task": "t2i"} if not case.sources else {"images": (images * 2)[: case.sources]}
        thinks = {"bot_task": "think_recaption", "ar_seed": number}
        line |= thinks if case.think else {"bot_task": "image"}
        yield json.dumps({"task": "it2i", "seed": 100 * number, **line}) + "\n"


def main() -> None:
    """Print one case, or write all that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("count", "clock", "planted", "all"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=len(CASES["timed"]))
    for one in fields(Case):
        parser.add_argument(f"--{one.name}", type=int, default=one.default)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    case = Case(**{one.name: given[one.name] for one in fields(Case)})
    do = {"count": count, "clock": clock, "planted": lambda _: planted()}
    if one_of := do.get(given["what"]):
        return print(json.dumps(one_of(case), indent=1))
    out, counted = given["out"], {name: Case(**one) for name, one in CASES["counted"].items()}
    entry = json.loads(out.read_text()) if out.exists() else {"timed": {}}
    entry["environment"] = {"hardware": hardware(), "versions": versions(), "threads": 1}
    entry["counted"] = {name: count(one) for name, one in counted.items()}
    entry["by_steps"] = {
        n: {name: count(replace(one, steps=n)) for name, one in counted.items()} for n in STEPS
    }
    for name in [one for one in CASES["timed"] if one not in entry["timed"]][: given["cases"]]:
        entry["timed"][name] = clock(Case(**CASES["timed"][name]))
        out.write_text(json.dumps(entry, indent=1) + "\n")
    entry["planted"] = entry.get("planted") or planted()
    out.write_text(json.dumps(entry, indent=1) + "\n")


if __name__ == "__main__":
    main()
