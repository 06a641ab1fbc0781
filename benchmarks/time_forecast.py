"""What `hyimg plan` says a manifest takes, beside the clock of the command that runs it.

Rates come from runs of other manifests (the packaged ones, `--from runs`), or from `plan --measure`
of each manifest itself (`--from measurement`). Then each held-out manifest is planned and run, in
fresh processes and in turn, so that what else the machine does falls on all of them alike. The
clock is that of the whole command, from its start to its exit.

    python benchmarks/time_forecast.py --runs 5 --out benchmarks/results/time-forecast.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyimg_cli.engine.timing.machine import Processors
from hyimg_cli.journal.provenance import hardware, versions

_RECIPES = Path(__file__).parent.parent / "recipes"
_SHAPES = ("circle", "square", "triangle")
_COLOURS = ("red", "blue", "green", "yellow", "black", "white")
# Runs that leave the rates: the packaged manifests.
_KNOWN = ("quickstart", "quickstart-video")


def main() -> None:
    """Measure, print a table, and write everything as JSON."""
    arguments = _arguments()
    sides = ("runs", "measurement") if arguments.rates == "both" else (arguments.rates,)
    found = [one for side in sides for one in _measured(side, arguments.runs)]
    for one in found:
        print(_said(one))
    if arguments.out:
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "what": "seconds that hyimg plan says of held-out manifests, and those that they took",
            "hardware": hardware(),
            "versions": versions(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "manifests": found,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _measured(rates: str, runs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        manifests = {name: _written(place, name, lines) for name, lines in _held_out().items()}
        kept = {name: place / f"cache-{name}" for name in manifests}
        for name, manifest in manifests.items():
            if rates == "measurement":
                _hyimg("plan", manifest, "--measure", "-q", "-o", place / "none", cache=kept[name])
            else:
                kept[name] = place / "cache"
        if rates == "runs":
            for number in range(2):
                for known in _KNOWN:
                    out = place / f"{known}-{number}"
                    _hyimg("generate", known, "-q", "-o", out, cache=place / "cache")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in manifests}
        for number in range(runs):
            for name, manifest in manifests.items():
                out = place / f"{name}-{number}"
                plan = _hyimg("plan", manifest, "--json", "-o", out, cache=kept[name])
                before, began = Processors.read(), time.perf_counter()
                # Of its own it would learn: it leaves nothing.
                _hyimg("generate", manifest, "-q", "-o", out, cache=None)
                took = time.perf_counter() - began
                others = Processors.read().others_since(before)
                said = {k: v for k, v in json.loads(plan)["time"].items() if k != "phases"}
                found[name].append({"said": said, "took_s": took, "others_with_run": others})
        return [{"manifest": name, "rates": rates, "runs": of} for name, of in found.items()]


def _said(one: dict[str, Any]) -> str:
    ratios = [run["said"]["seconds"] / run["took_s"] for run in one["runs"]]
    inside = sum(run["said"]["low"] <= run["took_s"] <= run["said"]["high"] for run in one["runs"])
    took = [run["took_s"] for run in one["runs"]]
    return (
        f"{one['manifest']} by {one['rates']}: took {statistics.median(took):.1f} s "
        f"({min(took):.1f} to {max(took):.1f}); said/took {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}); inside the spread {inside} of {len(ratios)}"
    )


def _held_out() -> dict[str, list[dict[str, Any]]]:
    """Pictures of other sizes of group, steps and prompts than any that left rates."""
    things = [f"a {_COLOURS[n % 6]} {_SHAPES[n % 3]}" for n in range(40)]
    pictures = [
        {
            "custom_id": f"p{n}",
            "prompt": f"{things[n]} on a {_COLOURS[(n + 2) % 6]} background",
            "seed": n,
            "num_inference_steps": (30, 50)[n % 2],
        }
        for n in range(40)
    ]
    sources = [_RECIPES / "quickstart" / f"{n}.png" for n in ("red-circle", "yellow-square")]
    edits = [
        {
            "custom_id": f"e{n}",
            "prompt": f"make the {('circle', 'square')[n % 2]} {_COLOURS[n % 6]}",
            "images": [str(sources[n % 2])],
            "seed": n,
            "bot_task": ("think_recaption", "recaption", "none")[n % 3],
        }
        for n in range(25)
    ]
    films = [
        {
            "custom_id": f"f{n}",
            "task": "t2v",
            "prompt": f"{things[n]} moves to the right",
            "seed": n,
            "num_inference_steps": 12,
        }
        for n in range(5)
    ]
    return {"pictures": pictures, "edits": edits, "films": films}


def _written(place: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = place / f"{name}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def _hyimg(*arguments: object, cache: Path | None) -> str:
    kept = ["--no-disk-cache"] if cache is None else ["--cache-dir", str(cache)]
    command = [sys.executable, "-m", "hyimg_cli", *map(str, arguments), *kept]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each held-out manifest")
    parser.add_argument("--from", dest="rates", default="both", help="runs, measurement, or both")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
