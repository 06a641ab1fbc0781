"""A released editor's way through the product on the fake GPU: load, encode, steps and decode.

By the run's own pipeline, which draws one picture at a time. Weights have no numbers; the rest is
the product's code and the libraries'.
"""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from fake_gpu.released_editors import CHECKPOINTS, write_released
from fake_gpu.trace import Stages, Trace, fake_process
from PIL import Image
from torch import nn

from hyimg_cli.memory.videos import needs_of
from hyimg_cli.models import registry
from hyimg_cli.models.diffusers_image.model import LatentImageModel
from hyimg_cli.models.diffusers_image.table import KINDS
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.pipelines.queue import Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import MachineInfo, ModelChoice, Offloading, OutputConfig, RunConfig
from hyimg_cli.spec.events import Progress
from hyimg_cli.spec.job import ImageJob, SizeRequest
from hyimg_cli.spec.options import TextSampling

SIDE, STEPS = 1024, 2


def trace(folder: Path, name: str, offload: Offloading) -> Trace:
    """Run one job of a released editor."""
    checkpoint = write_released(folder / "checkpoint", name)
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(folder / "source.png")
    edits = KINDS[CHECKPOINTS[name][0]].most > 0
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
    )
    machine = MachineInfo(has_gpu=True, has_triton=True)
    choice = ModelChoice(
        str(checkpoint), dtype="bfloat16", device="cuda:0", cpu_offload=offload, machine=machine
    )
    config = RunConfig(OutputConfig(folder), model=choice)
    card = registry.model_card(job.model)
    assert card.networks is not None
    needs = needs_of(job, card.networks, config)
    with fake_process() as stages:
        stages.trace.planned = {name: need.total for name, need in needs.items()}
        _run(stages, config, job)
    return stages.trace


def _run(stages: Stages, config: RunConfig, job: ImageJob) -> None:
    """Draw it with the run's own pipeline; what has happened is told of by its events."""
    pipeline, trace = EditPipeline(config), stages.trace
    stages.gpu.forget()
    for event in pipeline.use(job.model, [job], None):
        if isinstance(event, Progress):
            stages.end(f"encode {len(trace.stages)}")
    stages.end("load")
    told = deque[Any]()
    for _ in pipeline.work(TicketQueue([Ticket(job, tell=told.append)], is_whole=True)):
        event = told.popleft()
        if isinstance(event, Lost):
            raise event.error
        if isinstance(event, Progress) and event.phase == "denoise":
            stages.end(f"step {event.done}" if event.done else "begin")
            trace.blocks, trace.block_bytes = _blocks(pipeline._resident())
    stages.end("decode")


def _blocks(model: LatentImageModel) -> tuple[int, int]:
    transformer: Any = model.have("transformer")
    kinds = transformer._repeated_blocks
    lists = (one for one in transformer.modules() if isinstance(one, nn.ModuleList))
    found = [block for one in lists for block in one if type(block).__name__ in kinds]
    every = (one.nbytes for block in found for one in (*block.parameters(), *block.buffers()))
    return len(found), sum(every)
