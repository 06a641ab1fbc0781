"""Jobs a minute, alone and together: 32 mixed jobs of the embedded model in several settings.

What is measured: the wall time of `Session.run` over the whole plan, loading and prewarming left
out, each setting in turn, again and again (A B C A B C ..), one warm-up round before. Random seeds
are fixed, so every run draws the same pictures; whether the pixels agree between settings is part
of the result.

    python benchmarks/batching.py --rounds 5 --out benchmarks/results/batching.json
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.manifest.resolve import resolve_jobs
from hyimg_cli.models import registry
from hyimg_cli.settings.precedence import settle
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import Event, JobDone, ModelLoaded, Prewarmed

SETTINGS = {
    "alone": BatchConfig(max_size=1),
    "together": BatchConfig(max_size=16),
    "alone, not batch-invariant": BatchConfig(max_size=1, is_invariant=False),
    "together, not batch-invariant": BatchConfig(max_size=16, is_invariant=False),
}
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "black", "pink")


def main() -> None:
    """Measure and print a table; write everything as JSON."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        manifest = _manifest(Path(name))
        sessions = {key: _Bench(key, batch, manifest) for key, batch in SETTINGS.items()}
        for round_ in range(arguments.rounds + 1):
            for bench in sessions.values():
                bench.run(Path(name) / f"{round_}", counts=round_ > 0)
    result = _result(list(sessions.values()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["settings"]:
        print(f"{row['name']:32} {row['jobs_per_minute']:7.1f} jobs/min  {row['seconds']}")


class _Bench:
    """One setting: its session stays loaded from round to round."""

    def __init__(self, name: str, batch: BatchConfig, manifest: Path) -> None:
        self.name, self.batch = name, batch
        settings = settle({}, {}, {})
        jobs, faults = resolve_jobs(read_manifest(manifest), settings, registry.model_card)
        assert not faults, faults
        self.plan = make_plan(jobs, registry.model_card)
        self.session = Session(RunConfig(OutputConfig(manifest.parent), batch=batch))
        self.seconds: list[float] = []
        self.pixels: dict[str, str] = {}

    def run(self, out: Path, *, counts: bool) -> None:
        with RunFolder(out / self.name) as folder:
            seconds = _timed(self.session.run(self.plan, folder), self.pixels)
        if counts:
            self.seconds.append(seconds)


def _timed(events: Any, pixels: dict[str, str]) -> float:
    """Wall seconds of a run without its loading and prewarming."""
    started, beside_s = time.perf_counter(), 0.0
    event: Event
    for event in events:
        match event:
            case ModelLoaded():
                beside_s += event.load_s
            case Prewarmed():
                beside_s += event.prewarm_s
            case JobDone():
                pixels[event.outcome.custom_id] = event.outcome.outputs[0].pixel_sha256
    return time.perf_counter() - started - beside_s


def _manifest(folder: Path) -> Path:
    """32 jobs: pictures from text and edits of four sources, with and without text to write."""
    for n in range(4):
        pixels = np.full((64, 64, 3), 40 * n + 60, dtype=np.uint8)
        pixels[16:48, 16:48] = (220, 30 * n, 40)
        Image.fromarray(pixels).save(folder / f"source-{n}.png")
    tasks = ("think_recaption", "recaption", "none", "recaption")
    lines = []
    for n in range(32):
        line: dict[str, Any] = {"custom_id": f"job-{n:02}", "bot_task": tasks[n % 4], "seed": n}
        line["prompt"] = f"a {COLOURS[n % 8]} circle on a white background"
        if n % 2:
            line["prompt"] = f"make it {COLOURS[n % 8]}"
            line["images"] = [f"source-{n % 4}.png"]
        lines.append(json.dumps(line))
    path = folder / "mixed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _result(benches: list[_Bench]) -> dict[str, Any]:
    expected = benches[0].pixels
    rows = [
        {
            "name": bench.name,
            "batch": asdict(bench.batch),
            "seconds": [round(s, 3) for s in bench.seconds],
            "jobs_per_minute": 60 * len(expected) / statistics.median(bench.seconds),
            "pixels_equal_to_the_first": sum(
                bench.pixels[name] == digest for name, digest in expected.items()
            ),
        }
        for bench in benches
    ]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "what": "32 mixed jobs, embedded model, wall time without loading and prewarming",
        "hardware": hardware(),
        "versions": versions(),
        "model": registry.fingerprint(registry.EMBEDDED),
        "jobs": len(expected),
        "settings": rows,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/batching.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
