"""Running the plan's video shapes once before they count, where that costs less than it saves.

A stand-in of the same size, frames and prompts takes one denoise step, all branches of it; its
latents are kept nowhere. Nothing is decoded: that would cost as much as a job's own decode, and
what it made ready, an allocator's pieces, the next denoise step gives back. A shape of one or two
jobs is left alone: the step would cost them more than the first of them waits for it. So is a CPU,
on which the first job takes no longer than the others.
Every random draw has a generator of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.video.stages import (
    Denoised,
    Stage,
    VideoStages,
    VideoWork,
    denoise,
    encode,
)
from hyimg_cli.spec.job import Size, VideoJob

# Videos of a shape that are worth a step beforehand.
_FEWEST = 3


# What a job's forwards depend on but for the length of its text, which is trimmed to each prompt:
# model, size, frames, branches.
VideoShape = tuple[str, Size, int, int]


def shape_of(job: VideoJob) -> VideoShape:
    """The shape that a job will run in."""
    return job.model, job.size, job.num_frames, job.branch_count


def prewarm(jobs: Sequence[VideoJob], stages: VideoStages, *, warmed: set[VideoShape]) -> int:
    """Run every shape of several jobs that is not in `warmed` yet, and add it; how many ran.

    None where the device has nothing to make ready.
    A shape whose stand-in fails is not counted: the job itself will fail, and say why.
    """
    if not starts_slowly(stages.model.device):
        return 0
    shapes = {shape_of(job): job for job in reversed(jobs)}
    alike = Counter(map(shape_of, jobs))
    new = [shape for shape in shapes if alike[shape] >= _FEWEST and shape not in warmed]
    warmed.update(new)
    return sum(_runs(shapes[shape], stages) for shape in new)


def starts_slowly(device: torch.device) -> bool:
    """True if the first forward of a shape takes longer there than those behind it."""
    return device.type != "cpu"


def _runs(job: VideoJob, stages: VideoStages) -> bool:
    stand_in = replace(job, custom_id="prewarm", num_inference_steps=1)
    work = VideoWork(stand_in, PhaseClock(0.0, lambda: None))
    with Attempt() as tried:
        for _ in _denoise(work, stages):
            pass
    return tried.error is None


def _denoise(work: VideoWork, stages: VideoStages) -> Stage[Denoised]:
    encoded = yield from encode(work, stages)
    return (yield from denoise(work, encoded, stages))
