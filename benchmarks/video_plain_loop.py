"""Our denoising beside a plain loop over diffusers' pipeline: same folder, same seeds, same jobs.

What is measured: for every job, the pipeline's call up to its latents (it encodes both prompts each
time); our two ways, stock and hoisted, encoding and denoising apart. The three take turns job by
job, again and again, after one warm-up round; nothing is decoded. On a machine that others use too,
wall time says little, so the process's own CPU time stands beside it (one thread). How far our
latents are from the pipeline's is part of the result.

With `--whole`: ten jobs of three prompts from strings to MP4 files, by the pipeline loaded once and
by one session, in turn; loading is left out. The session starts with nothing kept, so it embeds
each prompt once; its folder and journal are in its time.

    OMP_NUM_THREADS=1 python benchmarks/video_plain_loop.py --rounds 3 --out result.json
    OMP_NUM_THREADS=1 python benchmarks/video_plain_loop.py --rounds 3 --whole --out whole.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.media.video import write_video
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import LatentVideoModel
from hyimg_cli.settings.run import CacheConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobDone
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.plan import Plan

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes" / "build-tiny-video"))
PROMPTS = ('a red ball with "HI" on it', "a blue cube", "")
SHAPES = ((Size(48, 80), 9), (Size(96, 160), 17))


def main() -> None:
    """Measure and print a table; write everything as JSON."""
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        from tiny_checkpoints import wan

        wan.write(Path(name) / "wan")
        settings = [("tiny-video", "float32"), ("tiny-video", "bfloat16")]
        folders = [*settings, (str(Path(name) / "wan"), "float32")]
        if arguments.whole:
            runs = [_whole(folder, arguments.rounds) for folder, dtype in folders[::2]]
        else:
            runs = [_compared(folder, dtype, arguments.rounds) for folder, dtype in folders]
    what = "a job's latents: seconds, and distance to the pipeline's"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": "ten jobs of three prompts, strings to files" if arguments.whole else what,
        "load": round(os.getloadavg()[0], 1),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "rounds": arguments.rounds,
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for run in runs:
        for row in run["ways"]:
            print(
                f"{run['model']:12} {run.get('dtype', ''):9} {row['shape']:12} {row['way']:9} "
                f"cpu {row['cpu_s']}  wall {row['wall_s']}  {row.get('max_abs_difference')}"
            )


def _compared(folder: str, dtype: Any, rounds: int) -> dict[str, Any]:
    """Every job by every way, in turns."""
    pipeline = _pipeline(folder, dtype)
    ways = {
        name: registry.load_video(ModelChoice(folder, dtype=dtype, device="cpu"), is_fast=is_fast)
        for name, is_fast in (("stock", False), ("hoisted", True))
    }
    times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    apart: dict[tuple[str, str], list[float]] = defaultdict(list)
    largest = 0.0
    for round_ in range(rounds + 1):
        for job in _jobs(pipeline, round_):
            shape = f"{job.size}x{job.num_frames}"
            expected, taken = _timed(lambda job=job: _plain(pipeline, job))
            largest = max(largest, float(expected.abs().max()))
            record = [("plain loop", taken)]
            for name, model in ways.items():
                own, taken, encoded = _own(model, job)
                apart[name, shape].append(float((own.float() - expected.float()).abs().max()))
                record += [(f"{name}: denoise", taken), (f"{name}: encode", encoded)]
            if round_:
                for name, taken in record:
                    times[name, shape].append(taken)
    return {
        "model": ways["stock"].card.name,
        "dtype": dtype,
        "steps": 4,
        "jobs_a_round": len(_jobs(pipeline, 0)),
        "largest_latent": largest,
        "ways": [_row(name, shape, taken, apart) for (name, shape), taken in times.items()],
    }


def _whole(folder: str, rounds: int) -> dict[str, Any]:
    """Ten jobs by both, in turns, the first round to warm up."""
    pipeline = _pipeline(folder, "float32")
    pipeline.vae.enable_tiling()
    choice = ModelChoice(device="cpu", dtype="float32")
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    equal = 0
    with tempfile.TemporaryDirectory() as name:
        config = RunConfig(OutputConfig(Path(name)), model=choice, cache=CacheConfig())
        jobs = [replace(job, model=folder) for job in _ten(pipeline)]
        plan = make_plan(jobs, registry.model_card)
        with Session(config) as session:
            for round_ in range(rounds + 1):
                place = Path(name) / str(round_)
                place.mkdir()
                made, plainly = _timed(lambda place=place: _all_plain(pipeline, jobs, place))
                session.forget()
                lines, ours = _timed(lambda place=place: _session(session, plan, place / "own"))
                equal = sum(made[one] == pixels for one, pixels in lines.items())
                if round_:
                    times["plain loop"].append(plainly)
                    times["session"].append(ours)
    ways = [_row(name, "ten jobs", taken, {}) for name, taken in times.items()]
    return {"model": Path(folder).name, "jobs": len(jobs), "equal_pixels": equal, "ways": ways}


def _ten(pipeline: Any) -> list[VideoJob]:
    """Ten jobs of three prompts in the smaller shape."""
    small = [job for at in range(4) for job in _jobs(pipeline, at)[:: len(SHAPES)]][:10]
    return [replace(job, custom_id=f"job-{number}") for number, job in enumerate(small)]


def _all_plain(pipeline: Any, jobs: list[VideoJob], folder: Path) -> dict[str, str]:
    """By job, the digest of its pixels, each written as a film."""
    made = {}
    for job in jobs:
        frames = (_plain(pipeline, job, "np")[0] * 255).round().astype(np.uint8)
        film = folder / f"{job.custom_id}.mp4"
        made[job.custom_id] = write_video(film, [frames], fps=job.fps, comment=None).pixel_sha256
    return made


def _session(session: Session, plan: Plan, folder: Path) -> dict[str, str]:
    with RunFolder(folder) as place:
        done = [e.outcome for e in session.run(plan, place) if isinstance(e, JobDone)]
    return {one.custom_id: one.outputs[0].pixel_sha256 for one in done}


def _row(
    name: str, shape: str, taken: list[tuple[float, float]], apart: dict[Any, list[float]]
) -> dict[str, Any]:
    wall, cpu = zip(*taken, strict=True)
    row = {"way": name, "shape": shape, "calls": len(taken), "cpu_s": _spread(cpu)}
    row["wall_s"] = _spread(wall)
    way, _, phase = name.partition(": ")
    if phase == "denoise":
        row |= {
            "jobs_compared": len(apart[way, shape]),
            "max_abs_difference": max(apart[way, shape]),
        }
    return row


def _spread(seconds: Any) -> dict[str, float]:
    middle = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {key: round(value, 4) for key, value in middle.items()}


def _jobs(pipeline: Any, round_: int) -> list[VideoJob]:
    """Three prompts in two shapes; seeds change from round to round."""
    config = pipeline.scheduler.config
    base = VideoJob(
        custom_id="job",
        task="t2v",
        prompt="",
        negative_prompt="blurry",
        model="",
        seed=0,
        size=Size(48, 80),
        num_frames=9,
        fps=8,
        num_inference_steps=4,
        guidance_scale=6.0,
        flow_shift=config.get("shift", config.get("flow_shift")),
    )
    return [
        replace(base, prompt=prompt, size=size, num_frames=frames, seed=100 * round_ + number)
        for number, prompt in enumerate(PROMPTS)
        for size, frames in SHAPES
    ]


def _pipeline(folder: str, dtype: str) -> Any:
    from diffusers import DiffusionPipeline

    path = registry.resolve_model(folder)
    pipeline = DiffusionPipeline.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _plain(pipeline: Any, job: VideoJob, output: str = "latent") -> Any:
    options: dict[str, Any] = {}
    if hasattr(pipeline, "guider"):
        pipeline.guider.guidance_scale = job.guidance_scale
    else:
        options["guidance_scale"] = job.guidance_scale
    return pipeline(
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        height=job.size.height,
        width=job.size.width,
        num_frames=job.num_frames,
        num_inference_steps=job.num_inference_steps,
        generator=torch.Generator().manual_seed(job.seed),
        output_type=output,
        **options,
    ).frames


Taken = tuple[float, float]


def _own(model: LatentVideoModel, job: VideoJob) -> tuple[Tensor, Taken, Taken]:
    """Latents, and the seconds of denoising and of encoding."""
    texts = model.texts(job)
    embeddings, encoded = _timed(lambda: {text: model.prompts.encode(text) for text in texts})

    def denoised() -> Tensor:
        denoiser = model.denoiser(job, embeddings)
        latents = denoiser.initial_latents()
        for index in range(denoiser.steps):
            latents = denoiser.step(index, latents)
        return latents

    latents, taken = _timed(denoised)
    return latents, taken, encoded


def _timed(call: Callable[[], Any]) -> tuple[Any, Taken]:
    """What a call returns, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/video-plain-loop-2core-cpu.json")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
