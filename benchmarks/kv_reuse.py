"""What reusing the AR stage's K/V is worth: by count for the released model, by clock for the
embedded one, and what inexact reuse costs in the pictures.

    python benchmarks/kv_reuse.py count --steps 8 --sources 3      one case, counted
    python benchmarks/kv_reuse.py clock --steps 8 --batch 4        one case, timed
    python benchmarks/kv_reuse.py planted                          faults in the reuse, in dB
    python benchmarks/kv_reuse.py all --out results/NAME.json      every case of docs/kv-reuse.md

Counted: multiplications and additions of the transformer, in FLOP (the VAE, the vision encoder and
the convolutions around the transformer are the same in every variant, and left out). Timed:
processor seconds of a run of all its jobs, variants in turn, warm-up apart.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measure.bench import faults
from released import SMALL, released
from shapes.floors import work

from hyimg_cli.engine import runner
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.measure.bench.harness import compare
from hyimg_cli.measure.bench.runs import runs_of, shared_models
from hyimg_cli.measure.bench.scenario import SCENARIOS, read_scenario
from hyimg_cli.models.hunyuan_image3.config import architecture
from hyimg_cli.quality.metrics import PIXEL_METRICS
from hyimg_cli.settings.config import build_run_config, settle
from hyimg_cli.settings.table import SETTINGS

ARCH = architecture(released(json.loads((SMALL / "config.json").read_text())))
# Tokens of the system prompt `en_unified`, taken from its 5,673 characters; of all tags and roles
# before, and behind, a job's own text; of markers and the vision encoder's tokens of a source.
SYSTEM, BEFORE, BEHIND, AROUND_SOURCE = 1150, 4, 11, 1030
# Behind the text: its closing tag and what opens the picture, which the AR stage was not fed.
UNFED = 5
REUSE, ONCE, EVERY = read_scenario("kv-reuse").labels


@dataclass(frozen=True)
class Case:
    """Edits that are run together: of `batch` prompts, with `seeds` pictures of each one's text.
    `prompt` and `think` are tokens; without thinking the AR stage chooses the size alone.
    """

    steps: int = 50
    width: int = 1216
    height: int = 832
    sources: int = 1
    prompt: int = 50
    think: int = 450
    batch: int = 1
    seeds: int = 1

    @property
    def cells(self) -> int:
        """Tokens of a picture; sources are of its size."""
        return self.width * self.height // 256

    @property
    def command(self) -> str:
        """The words behind `kv_reuse.py count` or `clock`."""
        plain = Case()
        return " ".join(
            f"--{one.name} {getattr(self, one.name)}"
            for one in fields(self)
            if getattr(self, one.name) != getattr(plain, one.name)
        )


def flops(rows: int, seen: int) -> float:
    """Of all layers, for `rows` tokens of one sequence with `seen` before them; causal, which is
    less than what source images see, for each other, by under 1 % of a prefix.
    """
    pairs = rows * seen + rows * (rows + 1) // 2
    layer = work(ARCH, "dense", rows=rows, pairs=pairs, kv_slots=0, experts_read=0, width_bytes=2)
    return ARCH.num_hidden_layers * (layer.flops + layer.expert_flops)


def count(case: Case) -> dict[str, Any]:
    """PFLOP of the diffusion stage by variant, and of the AR stage, which is the same in all."""
    shared = SYSTEM + BEFORE + case.sources * (case.cells + AROUND_SOURCE)
    prefix = shared + case.prompt + case.think + BEHIND
    live = case.cells + 1
    # Image tokens see each other fully: twice as many pairs as causal ones.
    denoise = 2 * (flops(live, prefix) + flops(live, 0) - flops(1, 0) * live)
    unfed = UNFED if case.think else 1
    text = flops(prefix - unfed, 0)
    whole = 2 * flops(prefix, 0)
    # The negative branch has everything before the prompt in common with the positive one.
    first = flops(unfed, prefix - unfed) + flops(prefix - shared, shared)
    # Behind the first picture of a text only the last token of each branch is computed.
    later = 2 * flops(1, prefix - 1)
    pictures = case.batch * case.seeds
    steps = pictures * case.steps * denoise
    found = {
        REUSE: steps + case.batch * (first + (case.seeds - 1) * later),
        ONCE: steps + pictures * whole,
        EVERY: steps + pictures * case.steps * whole,
    }
    saved = 1 - found[REUSE] / found[ONCE]
    return {
        "prefix_tokens": prefix,
        "pflop": {name: value / 1e15 for name, value in found.items()},
        "pflop_ar_stage": case.batch * text / 1e15,
        "saved_of_once": saved,
        "over_once": found[ONCE] / found[REUSE],
        "over_every": found[EVERY] / found[REUSE],
        "kv_bytes": 2
        * (prefix + live)
        * 2
        * 2
        * ARCH.num_key_value_heads
        * ARCH.head_dim
        * ARCH.num_hidden_layers,
    }


def clock(case: Case, repeats: int) -> dict[str, Any]:
    """Processor seconds of a run by variant on the embedded model, and rows of its transformer."""
    scenario = read_scenario("kv-reuse")
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        (folder / "jobs.jsonl").write_text("".join(_lines(case)))
        manifest, load, runs = read_manifest(folder / "jobs.jsonl"), shared_models(), []
        for one in scenario.variants:
            # Pictures of one text share its prefix where reuse is on, and nowhere else.
            shares = one.settings["kv_reuse"] and case.seeds > 1
            written = {
                **one.settings,
                "batching_max_size": 16,
                "prefix_cache_mb": 512 if shares else 0,
                "device": "cpu",
                "prewarm": False,
            }
            settings = settle({}, {}, {k: SETTINGS[k].kind.read(v) for k, v in written.items()})
            jobs = [
                replace(job, num_inference_steps=case.steps)
                for job in runner.accept(manifest, settings)[0]
            ]
            config = build_run_config(settings, folder / one.label, None)
            run = opened.enter_context(runs_of("session", config, {}, load, keeps_kv=one.keeps_kv))
            runs.append((one.label, run, jobs))
        seconds: dict[str, list[float]] = {label: [] for label, _, _ in runs}
        rows: dict[str, Any] = {}
        for turn in range(repeats + 1):
            for label, run, jobs in runs:
                before = time.process_time()
                result = run(jobs, folder / f"{label}-{turn}")
                if turn:  # the first one warms up
                    seconds[label].append(time.process_time() - before)
                assert not result.failures, result.failures
                rows[label] = dict(result.rows)
    ratios = {
        f"over_{name}": sorted(b / a for a, b in zip(seconds[REUSE], seconds[label], strict=True))
        for name, label in (("once", ONCE), ("every", EVERY))
    }
    return {
        "n": repeats,
        "processor_s": {
            label: {"median": median(of), "min": min(of), "max": max(of)}
            for label, of in seconds.items()
        },
        **{
            name: {"median": median(of), "min": of[0], "max": of[-1]} for name, of in ratios.items()
        },
        "rows": rows,
    }


def _lines(case: Case) -> Iterator[str]:
    """The case in the embedded model's sizes: one size, texts as long as it writes them."""
    images = [str(SCENARIOS / "images" / f"{name}.png") for name in ("red-circle", "yellow-square")]
    words = [
        "make",
        "the",
        "circle",
        "blue",
        "and",
        "keep",
        "all",
        "else",
        "exactly",
        "as",
        "it",
        "is",
    ]
    prompt = " ".join((words * (case.prompt // len(words) + 1))[: case.prompt])
    for number in range(case.batch):
        line = {
            "custom_id": f"edit-{number}",
            "task": "it2i" if case.sources else "t2i",
            "prompt": f"{prompt} {number}",
            "bot_task": "think_recaption" if case.think else "image",
            "seed": number * 100,
            "n": case.seeds,
            "ar_seed": number,
        }
        sources = {"images": (images * 2)[: case.sources]} if case.sources else {}
        yield json.dumps(line | sources) + "\n"


PLANTED = {
    "K/V of the three tokens that open the picture left out": faults.hide_three_specials,
    "K/V passed on in bfloat16": faults.rounded_hand_off,
    "negative branch: eight slots of zeros, visible": faults.pad_negative_branch,
    "negative branch: a prefix of one token": faults.one_token_negative,
    "negative branch: one position too late": faults.shift_negative_branch,
    "source image missing from the prefix": faults.drop_source_image,
    "no fault": lambda patch: None,
}


def planted() -> dict[str, Any]:
    """By fault in the reusing variant: its pictures against recompute once, the worst of four."""
    scenario = replace(read_scenario("kv-reuse").pairs[0], steps=(8,), repeats=1)
    found = {}
    for name, plant in PLANTED.items():
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            plant(patch)
            result = compare(
                scenario,
                read_manifest(scenario.manifest),
                {"device": "cpu"},
                folder=Path(folder),
                metrics=tuple(PIXEL_METRICS.values()),
                tell=str,
            )
        row = result.worst.pairs[8]
        found[name] = row.worst() | {"verdict": result.verdict.name}
        found["another seed"] = result.worst.other_seed.worst()
    return found


CASES = {
    "an edit of 50 steps": Case(),
    "20 steps": Case(steps=20),
    "8 steps": Case(steps=8),
    "1024x1024": Case(width=1024, height=1024),
    "512x2048": Case(width=512, height=2048),
    "a prompt of 1,000 tokens": Case(prompt=1000),
    "no source": Case(sources=0),
    "3 sources": Case(sources=3),
    "3 sources, 8 steps": Case(sources=3, steps=8),
    "no thinking": Case(think=0),
    "2,000 tokens of thinking": Case(think=2000),
    "4 edits together": Case(batch=4),
    "16 edits together": Case(batch=16),
    "4 seeds of one text": Case(seeds=4),
    "16 seeds of one text, 8 steps": Case(seeds=16, steps=8),
}
# The embedded model draws one size, and its texts end where it likes.
_EIGHT = Case(steps=8)
TIMED = {
    "50 steps": Case(),
    "20 steps": Case(steps=20),
    "8 steps": _EIGHT,
    "8 steps, a prompt of 100 words": replace(_EIGHT, prompt=100),
    "8 steps, no source": replace(_EIGHT, sources=0),
    "8 steps, 3 sources": replace(_EIGHT, sources=3),
    "8 steps, no thinking": replace(_EIGHT, think=0),
    "8 steps, 4 edits together": replace(_EIGHT, batch=4),
    "8 steps, 16 edits together": replace(_EIGHT, batch=16),
    "8 steps, 4 seeds of one text": replace(_EIGHT, seeds=4),
}


def main() -> None:
    """Print one case, or write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("count", "clock", "planted", "all"))
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each variant")
    parser.add_argument("--out", type=Path)
    for one in fields(Case):
        parser.add_argument(f"--{one.name}", type=int, default=one.default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(**{one.name: getattr(given, one.name) for one in fields(Case)})
    if given.what != "all":
        do = {"count": count, "clock": lambda of: clock(of, given.repeats)}
        print(json.dumps(planted() if given.what == "planted" else do[given.what](case), indent=1))
        return
    steps: Mapping[str, Any] = {
        str(n): {name: count(replace(one, steps=n)) for name, one in CASES.items()}
        for n in (1, 2, 4, 8, 12, 20, 30, 50, 100)
    }
    entry = {
        "environment": {"hardware": hardware(), "versions": versions(), "threads": 1},
        "counted": {
            n: {"case": asdict(c), "command": c.command, **count(c)} for n, c in CASES.items()
        },
        "by_steps": steps,
        "timed": {},
    }
    for name, one in TIMED.items():
        print(name, file=sys.stderr)
        took = clock(one, given.repeats)
        entry["timed"][name] = {"case": asdict(one), "command": one.command, **took}
        given.out.write_text(json.dumps(entry, indent=1) + "\n")
    entry["planted"] = planted()
    given.out.write_text(json.dumps(entry, indent=1) + "\n")


if __name__ == "__main__":
    main()
