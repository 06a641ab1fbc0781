"""A released video checkpoint's way through the product's pipeline on the fake GPU."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fake_gpu.pipelines import planned, run
from fake_gpu.released_films import write_film
from fake_gpu.trace import Trace, fake_process
from PIL import Image
from torch import nn

from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.latent_video import ClipsModel
from hyimg_cli.pipelines.video.pipeline import VideoPipeline
from hyimg_cli.settings.run import (
    BatchConfig,
    MachineInfo,
    ModelChoice,
    Offloading,
    OutputConfig,
    RunConfig,
)
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob

STEPS = 2


@dataclass(frozen=True)
class Prepared:
    """Jobs that are made together, and how."""

    jobs: list[VideoJob]
    config: RunConfig
    card: VideoCard

    @property
    def planned(self) -> dict[str, int]:
        """The plan's bytes by moment."""
        return planned(needs_of(self.jobs[0], self.card, self.config))


def prepared(folder: Path, name: str, offload: Offloading) -> Prepared:
    """Write a checkpoint; its jobs have its own size and length.

    `name`: one of `FILMS`; behind it, for clips that are drawn together, " x " and their number.
    """
    name, _, count = name.partition(" x ")
    together = int(count or 1)
    model = str(write_film(folder / "checkpoint", name))
    card = registry.video_card(model)
    own, picture = card.defaults, str(folder / "start.png")
    pixels = np.zeros((own.size.height, own.size.width, 3), np.uint8)
    Image.fromarray(pixels).save(picture)
    job = VideoJob(
        custom_id="a",
        task="i2v" if card.needs_start else "t2v",
        prompt="a cat walks over the roofs of a town while it snows",
        negative_prompt="blurred",
        model=model,
        images=(picture,) if card.needs_start else (),
        seed=7,
        size=own.size,
        num_frames=own.num_frames,
        fps=own.fps,
        num_inference_steps=own.num_inference_steps if card.chunks else STEPS,
        guidance_scale=own.guidance_scale,
        guidance_scale_2=own.guidance_scale_2,
        flow_shift=own.flow_shift,
        fit=card.start.fit if card.needs_start and card.start else None,
        camera=f"none-{own.num_frames}" if card.has_camera else "",
    )
    machine = MachineInfo(has_gpu=True, has_triton=True)
    choice = ModelChoice(
        model, dtype="bfloat16", device="cuda:0", cpu_offload=offload, machine=machine
    )
    batch = BatchConfig(prewarm=False, clips=together)
    config = RunConfig(OutputConfig(folder), model=choice, batch=batch)
    jobs = [replace(job, custom_id=f"job-{number}", seed=number) for number in range(together)]
    return Prepared(jobs, config, card)


def trace(folder: Path, name: str, offload: Offloading, card_gb: int) -> Trace:
    """Run the jobs."""
    made = prepared(folder, name, offload)
    with fake_process(card_gb) as stages:
        stages.trace.planned = made.planned
        pipeline = VideoPipeline(made.config)
        run(stages, pipeline, made.card.model, made.jobs)
        network = pipeline._resident().networks[0]
        blocks = [*getattr(network, "blocks", getattr(network, "transformer_blocks", ()))]
        stages.trace.blocks = len(blocks)
        stages.trace.block_bytes = sum(map(_bytes, blocks))
        if not isinstance(pipeline._resident(), ClipsModel):
            stages.trace.notes = ["no batch: its videos are made one at a time"]
    return stages.trace


def _bytes(block: nn.Module) -> int:
    return sum(one.nbytes for one in (*block.parameters(), *block.buffers()))
