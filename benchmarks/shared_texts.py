"""Texts written once and written by each job: 4 seeds of 8 prompts, one ar_seed a prompt.

What is measured: the wall time of `Session.run` over the whole plan, loading left out, each variant
in turn, one warm-up round before; nothing is kept from round to round. Tokens are counted in the
result lines. Whether the pixels agree is part of the result.

    python benchmarks/shared_texts.py --rounds 5 --out benchmarks/results/shared_texts.json
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.settings.precedence import settle
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobDone, ModelLoaded

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
STEPS = (8,)


def main() -> None:
    """Measure and print a table; write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/shared_texts.json"))
    arguments = parser.parse_args()
    variants = [_Variant(steps, once=once) for steps in STEPS for once in (True, False)]
    with tempfile.TemporaryDirectory() as name:
        for round_ in range(arguments.rounds + 1):
            for variant in variants:
                variant.run(Path(name) / f"{round_}" / variant.name, counts=round_ > 0)
    rows = [variant.row() for variant in variants]
    for once, each in zip(variants[::2], variants[1::2], strict=True):
        assert once.pixels == each.pixels, "the same pictures"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": "4 seeds of 8 prompts, embedded model, 64x64, wall time without loading",
        "hardware": hardware(),
        "versions": versions(),
        "model": registry.fingerprint(registry.EMBEDDED),
        "variants": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        told = f"{row['name']:28} {row['median_s']:6.2f} s {row['decoded']:5} tokens"
        print(told, row["seconds"])


class _Variant:
    """One setting: its session stays loaded, and forgets what a round left."""

    def __init__(self, steps: int, *, once: bool) -> None:
        self.name = f"{steps} steps, {'once' if once else 'each'}"
        lines = [
            {"custom_id": shape, "prompt": f"a red {shape} on a blue background"}
            | {"seed": 4 * n, "n": 4, "vary": "picture", "num_inference_steps": steps}
            for n, shape in enumerate(SHAPES)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        manifest = read_manifest("-", StringIO(text))
        jobs, faults = resolve_jobs(manifest, settle({}, {}, {}), registry.model_card)
        assert not faults, faults
        self.plan = make_plan(jobs, registry.model_card)
        batch = BatchConfig(prewarm=False)
        self.session = Session(RunConfig(OutputConfig(Path()), batch=batch))
        if not once:
            self.session._images._texts = None  # type: ignore[assignment]
        self.is_once = once
        self.seconds: list[float] = []
        self.pixels: dict[str, str] = {}
        self.decoded = 0

    def run(self, out: Path, *, counts: bool) -> None:
        self.session._images.tree.clear()
        if self.is_once:
            self.session._images._texts.clear()
        with RunFolder(out) as folder:
            started, load_s, self.decoded = time.perf_counter(), 0.0, 0
            for event in self.session.run(self.plan, folder):
                if isinstance(event, ModelLoaded):
                    load_s = event.load_s
                if isinstance(event, JobDone):
                    outcome = event.outcome
                    self.pixels[outcome.custom_id] = outcome.outputs[0].pixel_sha256
                    self.decoded += outcome.kv_reuse.ar_decode_tokens if outcome.kv_reuse else 0
            seconds = time.perf_counter() - started - load_s
        if counts:
            self.seconds.append(seconds)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "median_s": statistics.median(self.seconds),
            "seconds": [round(s, 3) for s in self.seconds],
            "decoded": self.decoded,
        }


if __name__ == "__main__":
    main()
