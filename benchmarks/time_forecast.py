"""What `hyimg plan` says a manifest takes, beside the clock of the command that runs it.

Rates come from runs of other manifests: the packaged ones. Then each held-out manifest is planned
and run, in fresh processes and in turn, so that what else the machine does falls on all of them
alike. The clock is that of the whole command, from its start to its exit; with `--processor` the
command's and the estimate's seconds are both the processor's, for a machine that others use too.

    OMP_NUM_THREADS=1 python benchmarks/time_forecast.py --runs 5 [--processor] --out FILE
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hyimg_cli.journal.provenance import hardware, versions

_RECIPES = Path(__file__).parent.parent / "recipes"
_SHAPES = ("circle", "square", "triangle")
_COLOURS = ("red", "blue", "green", "yellow", "black", "white")
# Runs that leave the rates: the packaged manifests.
_KNOWN = ("quickstart", "quickstart-video")
_KNOWN_RUNS = 3
# The command with another clock in its estimates.
_BY_PROCESSOR = (
    "import time; from hyimg_cli.engine.eta import Eta; "
    "Eta.__init__.__kwdefaults__['clock'] = time.process_time; "
    "from hyimg_cli.cli.app import main; main()"
)


def main() -> None:
    """Measure, print a table, and write everything as JSON."""
    arguments = _arguments()
    found = _measured(arguments.runs, by_processor=arguments.processor)
    for one in found:
        print(_said(one))
    if arguments.out:
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "what": "seconds that hyimg plan says of held-out manifests, and those that they took",
            "hardware": hardware(),
            "versions": versions(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "clock": "processor" if arguments.processor else "wall",
            "manifests": found,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _measured(runs: int, *, by_processor: bool) -> list[dict[str, Any]]:
    hyimg = partial(_hyimg, by_processor=by_processor)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        cache = place / "cache"
        manifests = {name: _written(place, name, lines) for name, lines in _held_out().items()}
        for number in range(_KNOWN_RUNS):
            for known in _KNOWN:
                hyimg("generate", known, "-q", "-o", place / f"{known}-{number}", cache=cache)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in manifests}
        for number in range(runs):
            for name, manifest in manifests.items():
                out = place / f"{name}-{number}"
                plan, _ = hyimg("plan", manifest, "--json", "-o", out, cache=cache)
                # Of its own it would learn: it leaves nothing.
                _, took = hyimg("generate", manifest, "-q", "-o", out, cache=None)
                said = json.loads(plan)["time"]["seconds"]
                found[name].append({"said_s": said, "took_s": took, "load": os.getloadavg()[0]})
        return [{"manifest": name, "runs": of} for name, of in found.items()]


def _said(one: dict[str, Any]) -> str:
    ratios = [run["took_s"] / run["said_s"] for run in one["runs"]]
    took = [run["took_s"] for run in one["runs"]]
    return (
        f"{one['manifest']}: took {statistics.median(took):.1f} s ({min(took):.1f} to "
        f"{max(took):.1f}); taken/said {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
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


def _hyimg(*arguments: object, cache: Path | None, by_processor: bool) -> tuple[str, float]:
    """What a command prints, and the seconds that it took."""
    kept = ["--no-disk-cache"] if cache is None else ["--cache-dir", str(cache)]
    program = ["-c", _BY_PROCESSOR] if by_processor else ["-m", "hyimg_cli"]
    command = [sys.executable, *program, *map(str, arguments), *kept]
    began = _clock(by_processor=by_processor)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout, _clock(by_processor=by_processor) - began


def _clock(*, by_processor: bool) -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime if by_processor else time.perf_counter()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each held-out manifest")
    parser.add_argument("--processor", action="store_true", help="by the processor's seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
