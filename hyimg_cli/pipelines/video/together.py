"""Several clips denoised together: only where that was asked for, since it rounds differently. Each
is encoded and decoded alone, with its own noise, camera, text and picture.

Whatever goes wrong with them together is no end of theirs: each is then made alone.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from hyimg_cli.models.latent_video import LATENTS, ClipsModel
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.video.stages import (
    Denoised,
    EncodedConditions,
    Stage,
    VideoStages,
    VideoWork,
    denoise_all,
    encode,
)
from hyimg_cli.spec.job import VideoJob

logger = logging.getLogger(__name__)


def parts(jobs: Sequence[VideoJob], most: int) -> Iterator[list[VideoJob]]:
    """Jobs of one size and length in the numbers in which they are denoised."""
    alike: dict[float, list[VideoJob]] = {}
    for job in jobs:
        alike.setdefault(job.flow_shift, []).append(job)
    for same in alike.values():
        yield from (same[at : at + most] for at in range(0, len(same), most))


def denoise_together(
    works: Sequence[VideoWork], stages: VideoStages, model: ClipsModel
) -> Stage[dict[str, Denoised]]:
    """Latents behind the last step by id; none of those that are to be made alone: they have kept
    latents, cannot be encoded, or found no memory together.
    """
    new = [work for work in works if not (work.checkpoint and work.checkpoint.path.exists())]
    with Attempt() as tried:
        return (yield from _denoise(new, stages, model))
    assert tried.error is not None, "the clips gave nothing"
    reason = "out of memory" if isinstance(tried.error, torch.OutOfMemoryError) else tried.error
    note = f"{len(new)} clips failed together ({reason}); each was made alone"
    logger.warning(note)
    for work in new:
        work.warnings.append(note)
    tried.error.__traceback__ = tried.error.__context__ = None
    torch.cuda.empty_cache()
    return {}


def _denoise(
    works: Sequence[VideoWork], stages: VideoStages, model: ClipsModel
) -> Stage[dict[str, Denoised]]:
    encoded: list[EncodedConditions] = []
    for work in works:
        encoded.append((yield from encode(work, stages)))
    if len(works) < 2:
        return {}
    clips = [
        (work.job, one.texts[work.job.prompt], one.views[LATENTS].tensors[LATENTS])
        for work, one in zip(works, encoded, strict=True)
    ]
    made = yield from denoise_all(works, encoded, stages, partial(model.denoiser_of, clips))
    for work in works:
        work.clock.enter("queue")
    return {work.job.custom_id: one for work, one in zip(works, made, strict=True)}
