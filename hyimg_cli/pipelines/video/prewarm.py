"""Running the plan's video shapes once before they count: both branches, every tile shape.

A stand-in of the same size, frames and prompts goes through the same stages with two steps; its
latents are kept nowhere, its frames dropped. Every random draw has a generator of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.request import Request
from hyimg_cli.pipelines.video.stages import VideoStages, make_video
from hyimg_cli.spec.job import Size, VideoJob

# The second one meets what the first has left: a step cache, a compiled graph.
_STEPS = 2


@dataclass(frozen=True)
class VideoShape:
    """Key of the shapes of a job's forwards but for the length of its text, which is trimmed
    to each prompt.
    """

    model: str
    size: Size
    num_frames: int
    branch_count: int


def shape_of(job: VideoJob) -> VideoShape:
    """The shape that a job will run in."""
    return VideoShape(job.model, job.size, job.num_frames, job.branch_count)


def prewarm(jobs: Sequence[VideoJob], stages: VideoStages, *, warmed: set[VideoShape]) -> int:
    """Run every shape that is not in `warmed` yet, and add it; how many ran to their end.

    A shape whose stand-in fails is not counted: the job itself will fail, and say why.
    """
    new = {shape: job for job in reversed(jobs) if (shape := shape_of(job)) not in warmed}
    count = 0
    for shape, job in new.items():
        warmed.add(shape)
        count += _runs(job, stages)
    return count


def _runs(job: VideoJob, stages: VideoStages) -> bool:
    # Of a chunk one pass, and the clean one: there is a length of the cache for each chunk.
    most = _STEPS if stages.model.card.chunks is None else 1
    steps = min(most, job.num_inference_steps)
    stand_in = replace(job, custom_id="prewarm", num_inference_steps=steps)
    with Attempt() as tried:
        for _ in make_video(Request(stand_in, PhaseClock(0.0, lambda: None)), stages):
            pass
    return tried.error is None
