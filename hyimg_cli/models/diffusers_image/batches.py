"""Which jobs of an editor may be denoised together, before anything is encoded; no torch."""

from collections.abc import Hashable

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import view_size
from hyimg_cli.models.diffusers_image.kind import LibraryPipeline
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob


def batch_key(kind: LibraryPipeline, card: ModelCard, job: ImageJob) -> Hashable | None:
    """Return what jobs of a checkpoint that are denoised together have in common.

    Their steps must agree, and so must the rows that a step has. None: the job is drawn alone. That
    is a job with a step cache, whose state is one job's, and one of a model with keys and values
    that stay the same at each step.
    """
    if job.step_cache is not None or kind.prefix:
        return None
    try:
        sources = tuple(map(view_size, job.views))
    except SourceImageError:  # the job will fail
        return None
    schedule = (job.num_inference_steps, job.guidance_scale, job.flow_shift, job.skipped_steps)
    inputs = tuple(kind.own_inputs(job, card).items())
    return job.model, job.size, sources, schedule, job.lora, job.inpaints, job.part, inputs
