"""Main memory that a film's decode and its writing take, by its length.

What is measured, in a process of its own for each film: the most that it holds (VmHWM, set back
before) beyond what it held when a short film was done, from the first latent to the film's line.
Nothing is denoised: the latents are noise. The VAE is Wan 2.1's, whose decoder repeats pixels
instead of computing them: what is held beside frames is as little as can be.

    python benchmarks/decode_memory.py --out benchmarks/results/decode-memory-2core-cpu.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.engine.session import Session
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.settings.run import BatchConfig, ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobDone
from hyimg_cli.spec.job import Size, VideoJob

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "build-tiny-video"))
SIZE, LENGTHS = Size(480, 832), (41, 121)
FRAME_MB = SIZE.width * SIZE.height * 3 / 1e6


class Noise:
    """A denoiser without a step."""

    steps = 0

    def __init__(self, job: VideoJob, *_: Any, model: DiffusersVideo) -> None:
        shape = (1, model.card.latent_channels, *model.card.latent_grid(job.size, job.num_frames))
        generator = torch.Generator().manual_seed(job.seed)
        self.latents_BCFYX = torch.randn(shape, generator=generator)
        self.velocities = VelocityCache(None, ())

    def initial_latents(self) -> torch.Tensor:
        return self.latents_BCFYX


def repeated(
    decoder: WanDecoder3d, latents_BCFYX: torch.Tensor, *, first_chunk: bool, **_: Any
) -> torch.Tensor:
    """In place of the decoder's forward: one frame, then four, of a latent frame's cells."""
    frames = latents_BCFYX[:, :3].repeat_interleave(1 if first_chunk else 4, dim=2)
    return frames.repeat_interleave(8, dim=3).repeat_interleave(8, dim=4)


def main() -> None:
    """Measure films of each length, whole and tiled, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", type=int, default=0)
    parser.add_argument("--tiled", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(_measured(given.child, is_tiled=given.tiled))
        return
    rows: list[dict[str, Any]] = []
    for is_tiled in (False, True):
        found = {n: _in_a_fresh_process(n, is_tiled=is_tiled) for n in LENGTHS}
        rows.append({"is_tiled": is_tiled, "mb_by_frames": found})
        print(rows[-1], flush=True)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "what": f"{SIZE}, {FRAME_MB:.1f} MB a frame",
        "hardware": hardware(),
        "versions": versions(),
        "settings": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


def _in_a_fresh_process(frames: int, *, is_tiled: bool) -> float:
    command = [sys.executable, __file__, "--out", "", "--child", str(frames)]
    command += ["--tiled"] if is_tiled else []
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _measured(frames: int, *, is_tiled: bool) -> float:
    from tiny_checkpoints import wan

    WanDecoder3d.forward = repeated
    DiffusersVideo.denoiser = lambda model, *of: Noise(*of, model=model)  # type: ignore
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "wan", Path(name) / "out"
        wan.write(model)
        choice = ModelChoice(str(model), device="cpu", vae_use_tiling=is_tiled)
        config = RunConfig(OutputConfig(folder), model=choice, batch=BatchConfig(prewarm=False))
        with Session(config) as session, RunFolder(folder) as run:
            for count in (5, frames):
                before = _memory_mb("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")
                plan = make_plan([_job(str(model), count)], registry.model_card)
                events = list(session.run(plan, run))
                assert any(isinstance(event, JobDone) for event in events), events
            return round(_memory_mb("VmHWM") - before, 1)


def _job(model: str, num_frames: int) -> VideoJob:
    return VideoJob(
        custom_id=f"film-{num_frames}",
        task="t2v",
        prompt="a walk",
        negative_prompt="",
        model=model,
        seed=1,
        size=SIZE,
        num_frames=num_frames,
        fps=16,
        num_inference_steps=1,
        guidance_scale=1.0,
        flow_shift=3.0,
    )


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) * 1024 / 1e6


if __name__ == "__main__":
    main()
