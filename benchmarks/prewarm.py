"""The first job's denoise time against the second's, with and without prewarming.

What is measured: two jobs of one shape, one after another, in a fresh process each time; between
their first and last denoise step the wall time, and the CPU time of the thread that draws, which
other programs on the machine disturb less. Runs with and without take turns. The embedded
weights draw 256x256 here (16 times the tokens of 64x64), in a copy of the checkpoint whose base
size is changed: the pictures mean nothing, the work is real. With `--videos` there are three jobs
of the embedded video model, as few as are prewarmed.

    python benchmarks/prewarm.py --runs 12 --out benchmarks/results/prewarm.json
    python benchmarks/prewarm.py --runs 3 --videos --out benchmarks/results/prewarm-videos.json
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import DenoiseStep, PhaseStarted, Prewarmed
from hyimg_cli.spec.job import ImageJob, Job, Size, SizeRequest, TextSampling, VideoJob

SIDE = 256
STEPS = 20
WHAT = f"denoise of the first and of the second job, {SIDE}x{SIDE}, {STEPS} steps, CFG"
FILM, FILM_STEPS = "128x128, 9 frames", 6


def main() -> None:
    """Measure in fresh processes and write everything as JSON."""
    arguments = _arguments()
    if arguments.child:
        jobs = _videos() if arguments.videos else [_job(arguments.child, seed) for seed in range(2)]
        print(json.dumps(_measured(jobs, prewarm=arguments.prewarm)))
        return
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = _large_copy(Path(name) / "checkpoint")
        for _ in range(arguments.runs):
            for prewarm, measured in runs.items():
                measured.append(_in_a_fresh_process(checkpoint, arguments.videos, prewarm=prewarm))
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": f"three videos, {FILM}, {FILM_STEPS} steps, CFG" if arguments.videos else WHAT,
        "hardware": hardware(),
        "versions": versions(),
        "settings": [_row("with prewarm", runs[True]), _row("without", runs[False])],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["settings"]:
        print(f"{row['name']:14}", {k: v for k, v in row.items() if k.startswith("ratio")})


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of one setting; the ratio is first to second, median with smallest and largest."""
    row: dict[str, Any] = {"name": name, "runs": runs}
    for clock in ("wall_s", "cpu_s"):
        ratios = [run[clock][0] / run[clock][1] for run in runs]
        spread = statistics.median(ratios), min(ratios), max(ratios)
        row[f"ratio_{clock}"] = [round(value, 3) for value in spread]
    return row


def _large_copy(folder: Path) -> Path:
    """The embedded checkpoint, told that its base size is larger."""
    shutil.copytree(registry.resolve_model(registry.EMBEDDED), folder)
    for name, old, new in (
        ("config.json", '"image_base_size": 64', f'"image_base_size": {SIDE}'),
        ("tokenizer.json", "<img_size_64>", f"<img_size_{SIDE}>"),
        ("tokenizer_config.json", "<img_size_64>", f"<img_size_{SIDE}>"),
    ):
        path = folder / name
        path.write_text(path.read_text().replace(old, new))
    return folder


def _in_a_fresh_process(checkpoint: Path, videos: bool, *, prewarm: bool) -> dict[str, Any]:
    flags = [*(["--prewarm"] if prewarm else []), *(["--videos"] if videos else [])]
    command = [sys.executable, __file__, "--child", str(checkpoint), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measured(jobs: Sequence[Job], *, prewarm: bool) -> dict[str, Any]:
    """Seconds of every job's denoise loop, and of prewarming, in this process."""
    plan = make_plan(jobs, registry.model_card)
    batch = BatchConfig(max_size=1, prewarm=prewarm)
    wall: list[float] = []
    cpu: list[float] = []
    prewarm_s = prewarm_cpu_s = 0.0
    before = started = time.perf_counter(), time.thread_time()
    with Session(RunConfig(OutputConfig(Path()), batch=batch)) as session:
        for event in session.run(plan):
            now = time.perf_counter(), time.thread_time()
            match event:
                case Prewarmed():
                    prewarm_s, prewarm_cpu_s = event.prewarm_s, now[1] - before[1]
                case PhaseStarted(phase="denoise"):
                    started = now
                case DenoiseStep() if event.step == event.total:
                    wall.append(now[0] - started[0])
                    cpu.append(now[1] - started[1])
            before = now
    return {"wall_s": wall, "cpu_s": cpu, "prewarm_s": prewarm_s, "prewarm_cpu_s": prewarm_cpu_s}


def _videos() -> list[VideoJob]:
    film = VideoJob(
        custom_id="job",
        task="t2v",
        prompt="a red square moves left",
        negative_prompt="",
        model="tiny-video",
        seed=0,
        size=Size(128, 128),
        num_frames=9,
        fps=8,
        num_inference_steps=FILM_STEPS,
        guidance_scale=2.0,
        flow_shift=3.0,
    )
    return [replace(film, custom_id=f"job-{seed}", seed=seed) for seed in range(3)]


def _job(checkpoint: Path, seed: int) -> ImageJob:
    return ImageJob(
        custom_id=f"job-{seed}",
        task="t2i",
        prompt="a red circle on a white background",
        images=(),
        model=str(checkpoint),
        seed=seed,
        size=SizeRequest(SIDE, SIDE),
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        flow_shift=2.0,
        bot_task="none",
        text=TextSampling(0.0, 0, 1.0, 8),
        ar_seed=seed,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prewarm.json"))
    parser.add_argument("--videos", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prewarm", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
