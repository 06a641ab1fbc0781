"""The step cache at several intervals, each beside a plain run of as many full steps.

What is measured: `hyimg bench --compare step-cache` once for each interval, on the scenario's
pictures and on the films of `quickstart-video`. Distances are exact on a CPU. Passes of the model
are counted; the clock is that of a machine whose load stands beside it.

A bench that is done is kept in the work folder, and not run again: a call that was cut off goes on.

    python benchmarks/step_cache.py --work /tmp/step-cache --out benchmarks/results/step-cache.json
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.measure.bench.scenario import SCENARIOS
from hyimg_cli.measure.pairs import BENCH_JSON
from hyimg_cli.spec.step_cache import StepCache, count_full

INTERVALS = (2, 3, 4, 5)
KINDS = ("pictures", "films")
FILMS = Path(__file__).parent.parent / "recipes" / "quickstart-video.jsonl"
DEFAULT = 'step_cache = "taylor"'


def main() -> None:
    """Run what is not done yet, then write everything as JSON."""
    arguments = _arguments()
    benches = [
        _bench(arguments.work, kind, interval, arguments.repeats)
        for kind in KINDS
        for interval in INTERVALS
    ]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": "hyimg bench --compare step-cache, by interval; order 1, first 3, tail 1",
        "hardware": hardware(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "versions": versions(),
        "runs": arguments.repeats,
        "benches": benches,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for bench in benches:
        for row in bench["steps"]:
            print(bench["kind"], bench["interval"], bench["verdict"]["name"], json.dumps(row))


def _bench(work: Path, kind: str, interval: int, repeats: int) -> dict[str, Any]:
    """One interval's bench: its own where it is done, else run now."""
    folder = work / f"{kind}-{interval}"
    if not (folder / BENCH_JSON).exists():
        folder.mkdir(parents=True, exist_ok=True)
        scenario = folder / "step-cache.toml"
        text = (SCENARIOS / "step-cache.toml").read_text()
        scenario.write_text(text.replace(DEFAULT, f'step_cache = "taylor:interval={interval}"'))
        asked = ["--compare", scenario, "--manifest", _manifest(kind, folder)]
        asked += ["--repeats", str(repeats)]
        command = [sys.executable, "-m", "hyimg_cli", "bench", *asked, "-o", folder, "--json"]
        before = os.getloadavg()[0]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        assert ended.returncode in (0, 1), "the bench could not be carried out"
        load = [round(before, 1), round(os.getloadavg()[0], 1)]
        (folder / "load.json").write_text(json.dumps(load))
    entry = json.loads((folder / BENCH_JSON).read_text())
    return {
        "kind": kind,
        "interval": interval,
        "load": json.loads((folder / "load.json").read_text()),
        "verdict": entry["verdict"],
        "steps": [_row(entry, timing, interval) for timing in entry["timings"]],
    }


def _manifest(kind: str, folder: Path) -> Path:
    """The jobs to compare on: of films all lines with the bench's own steps."""
    if kind == "pictures":
        return SCENARIOS / "edits.jsonl"
    films = [json.loads(line) for line in FILMS.read_text().splitlines()]
    manifest = folder / "films.jsonl"
    plain = [{k: v for k, v in film.items() if k != "num_inference_steps"} for film in films]
    manifest.write_text("".join(f"{json.dumps(film)}\n" for film in plain))
    return manifest


def _row(entry: dict[str, Any], timing: dict[str, Any], interval: int) -> dict[str, Any]:
    """One step count: passes, distances (worst and median), and what the clock says."""
    steps = timing["steps"]
    full = count_full(StepCache(interval=interval), steps)

    def distance(name: str) -> list[Any]:
        row = next(row for row in entry["precision"] if row["name"].endswith(name))
        return [row["psnr_min"], row["psnr_median"]]

    return {
        "steps": steps,
        "full": full,
        "step_cache_db": distance(f"every step, {steps} steps"),
        "as_many_steps_db": distance(f"in {full} steps, against {steps}"),
        "other_seed_db": distance("other seed"),
        "denoise_rest_s": _seconds(timing, "denoise_rest"),
        "wall_s": {side: timing[side]["wall_s"] for side in ("a", "b")},
    }


def _seconds(timing: dict[str, Any], phase: str) -> dict[str, Any]:
    """Of a run of all jobs, with the cache (a) and without (b): median, least and most."""
    return {side: timing[side]["phases_s"][phase] for side in ("a", "b")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/step-cache-2core-cpu.json")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
