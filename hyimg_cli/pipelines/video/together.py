"""Several clips denoised together: only where that was asked for, since it rounds differently. Each
is encoded and decoded alone, with its own noise, camera, text and picture.

Whatever goes wrong with them together is no end of theirs: each is then made alone.
"""

# Legend: B clips, C channel, F latent frames, Y X latent rows and columns
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch

from hyimg_cli.models.latent_video import LATENTS, ClipsModel
from hyimg_cli.pipelines.out_of_memory import Attempt
from hyimg_cli.pipelines.request import Request
from hyimg_cli.pipelines.video.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.pipelines.video.stages import Denoised, EncodedConditions, VideoStages, encode
from hyimg_cli.spec.events import Progress
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.work import video_work

logger = logging.getLogger(__name__)
Requests = Sequence[Request[VideoJob]]
Checkpoints = Mapping[str, LatentsCheckpoint | None]
Together = Generator[Progress, None, dict[str, Denoised]]


def parts(jobs: Sequence[VideoJob], most: int) -> Iterator[list[VideoJob]]:
    """Jobs of one size and length in the numbers in which they are denoised."""
    alike: dict[float, list[VideoJob]] = {}
    for job in jobs:
        alike.setdefault(job.flow_shift, []).append(job)
    for same in alike.values():
        yield from (same[at : at + most] for at in range(0, len(same), most))


def denoise_together(
    requests: Requests, stages: VideoStages, model: ClipsModel, checkpoints: Checkpoints
) -> Together:
    """Latents behind the last step by id; none of those that are to be made alone: they have kept
    latents, cannot be encoded, or found no memory together.
    """
    new = [one for one in requests if not _has_kept(checkpoints[one.job.custom_id])]
    made: dict[str, Denoised] = {}
    with Attempt() as tried:
        made = yield from _denoised(new, stages, model, checkpoints)
    if tried.error is None:
        return made
    reason = "out of memory" if isinstance(tried.error, torch.OutOfMemoryError) else tried.error
    note = f"{len(new)} clips failed together ({reason}); each was made alone"
    logger.warning(note)
    for request in new:
        request.warnings.append(note)
    tried.error.__traceback__ = tried.error.__context__ = None
    torch.cuda.empty_cache()
    return {}


def _denoised(
    requests: Requests, stages: VideoStages, model: ClipsModel, checkpoints: Checkpoints
) -> Together:
    encoded: list[EncodedConditions] = []
    for request in requests:
        encoded.append((yield from encode(request, stages)))
    if len(requests) < 2:
        return {}
    clips = []
    for request, one in zip(requests, encoded, strict=True):
        job = request.job
        yield Progress(job.custom_id, "denoise", 0, video_work(job, model.card).steps)
        clips.append((job, one.texts[job.prompt], one.views[LATENTS].tensors[LATENTS]))
        request.clock.enter("denoise_first")
    denoiser = model.denoiser_of(clips)
    latents_BCFYX, steps = denoiser.initial_latents(), denoiser.steps
    for index in range(steps):
        latents_BCFYX = denoiser.step(index, latents_BCFYX)
        for number, request in enumerate(requests):
            if index == 0:
                request.clock.enter("denoise_rest")
            checkpoint, step = checkpoints[request.job.custom_id], index + 1
            if checkpoint and (checkpoint.is_due(step, steps) or denoiser.is_stop(step)):
                own_1CFYX, of_inputs = latents_BCFYX[number : number + 1], encoded[number]
                said = (of_inputs.warnings, of_inputs.notes)
                checkpoint.keep(Kept(step, steps, own_1CFYX, {}, *said))
            yield Progress(request.job.custom_id, "denoise", step, steps)
    for request in requests:
        request.clock.enter("queue")
    return {
        request.job.custom_id: Denoised(latents_1CFYX, steps, together=len(requests))
        for request, latents_1CFYX in zip(requests, latents_BCFYX.split(1), strict=True)
    }


def _has_kept(checkpoint: LatentsCheckpoint | None) -> bool:
    return checkpoint is not None and checkpoint.path.exists()
