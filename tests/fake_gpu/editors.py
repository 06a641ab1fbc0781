"""A released editor's way through the product on the fake GPU: load, encode, steps and decode.

By the run's own pipeline, which draws one picture at a time. Weights have no numbers; the rest is
the product's code and the libraries'.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fake_gpu.pipelines import planned, run
from fake_gpu.released_editors import CHECKPOINTS, write_released
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


@dataclass(frozen=True)
class Prepared:
    """A job, and how it is run."""

    job: ImageJob
    config: RunConfig

    @property
    def planned(self) -> dict[str, int]:
        """The plan's bytes by moment."""
        networks = registry.model_card(self.job.model).networks
        assert networks is not None
        return planned(needs_of(self.job, networks, self.config))


def prepared(folder: Path, name: str, offload: Offloading) -> Prepared:
    """Write a released editor's checkpoint, and a source for a job of its."""
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
    batch = BatchConfig(prewarm=False)
    return Prepared(job, RunConfig(OutputConfig(folder), model=choice, batch=batch))


def trace(folder: Path, name: str, offload: Offloading, card_gb: int) -> Trace:
    """Run one job of a released editor."""
    made = prepared(folder, name, offload)
    with fake_process(card_gb) as stages:
        trace = stages.trace
        trace.planned, trace.notes = made.planned, ["no batch: editors draw one picture at a time"]
        pipeline = EditPipeline(made.config)
        run(stages, pipeline, made.job.model, [made.job])
        trace.blocks, trace.block_bytes = _blocks(pipeline._resident())
    return trace


def _blocks(model: LatentImageModel) -> tuple[int, int]:
    transformer: Any = model.have("transformer")
    kinds = transformer._repeated_blocks
    lists = (one for one in transformer.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    every = (one.nbytes for block in found for one in (*block.parameters(), *block.buffers()))
    return len(found), sum(every)
