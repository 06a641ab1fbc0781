"""A released editor's way through the product on the fake GPU: load, encode, steps and decode.

By the run's own pipeline; `NAME x N` denoises N pictures together. Weights have no numbers; the
rest is the product's code and the libraries'.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_gpu.pipelines import planned, run
from fake_gpu.released_editors import CHECKPOINTS, write_released
from fake_gpu.table import rows
from fake_gpu.trace import Trace, fake_process
from PIL import Image
from torch import nn

from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.model import LatentImageModel
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.settings.run import (
    BatchConfig,
    MachineInfo,
    ModelChoice,
    Offloading,
    OutputConfig,
    RunConfig,
)
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

SIDE, STEPS = 1024, 2
_NO_BATCH = "no batch: traced with one picture at a time"


@dataclass(frozen=True)
class Prepared:
    """A job, how it is run, and how many like it are denoised together."""

    job: ImageJob
    config: RunConfig
    joined: int

    @property
    def planned(self) -> dict[str, int]:
        """The plan's bytes by moment."""
        networks = registry.model_card(self.job.model).networks
        assert networks is not None
        return planned(needs_of(self.job, networks, self.config, joined=self.joined))

    @property
    def jobs(self) -> list[ImageJob]:
        return [replace(self.job, custom_id=f"j{n}", seed=n) for n in range(self.joined)]


def prepared(folder: Path, name: str, offload: Offloading) -> Prepared:
    """Write a released editor's checkpoint, and a source for a job of its."""
    name, _, count = name.partition(" x ")
    joined = int(count or 1)
    checkpoint = write_released(folder / "checkpoint", name)
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(folder / "source.png")
    kind = KINDS[CHECKPOINTS[name][0]]
    edits = kind.most > 0
    job = ImageJob(
        custom_id="a",
        task="it2i" if edits else "t2i",
        prompt="turn the day into night and keep everything else as it is",
        model=str(checkpoint),
        images=(str(folder / "source.png"),) if edits else (),
        seed=7,
        size=SizeRequest(SIDE, SIDE),
        text=TextSampling(),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        flow_shift=1.0,
        layers=kind.layers or None,
    )
    machine = MachineInfo(has_gpu=True, has_triton=True)
    choice = ModelChoice(
        str(checkpoint), dtype="bfloat16", device="cuda:0", cpu_offload=offload, machine=machine
    )
    batch = BatchConfig(prewarm=False, is_invariant=joined == 1)
    return Prepared(job, RunConfig(OutputConfig(folder), model=choice, batch=batch), joined)


def trace(folder: Path, name: str, offload: Offloading, card_gb: int) -> Trace:
    """Run one job of a released editor, or several together."""
    made = prepared(folder, name, offload)
    with fake_process(card_gb) as stages:
        trace = stages.trace
        batches = {row["name"].partition(" x ")[0] for row in rows() if " x " in row["name"]}
        is_alone = name.partition(" x ")[0] not in batches and made.joined == 1
        trace.planned, trace.notes = made.planned, [_NO_BATCH] * is_alone
        pipeline = EditPipeline(made.config)
        run(stages, pipeline, made.job.model, made.jobs)
        trace.blocks, trace.block_bytes = _blocks(pipeline._resident())
    return trace


def _blocks(model: LatentImageModel) -> tuple[int, int]:
    transformer: Any = model.have("transformer")
    kinds = transformer._repeated_blocks
    lists = (one for one in transformer.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    every = (one.nbytes for block in found for one in (*block.parameters(), *block.buffers()))
    return len(found), sum(every)
