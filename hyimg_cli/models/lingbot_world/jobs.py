"""What of a job this model can follow; all of it is told before anything is loaded. No torch."""

from hyimg_cli.errors import JobError
from hyimg_cli.models.lingbot_world.poses import camera_path
from hyimg_cli.models.lingbot_world.schedule import INDICES
from hyimg_cli.spec.card import ChunkRule, VideoCard
from hyimg_cli.spec.job import VideoJob


def check_job(job: VideoJob, card: VideoCard, positions: int) -> None:
    """Passes a job that can be made. Raises JobError with the manifest's field in `where`."""
    assert card.chunks is not None, "the model works in chunks"
    check_shape(job, card, card.chunks, positions)
    if job.num_inference_steps != len(INDICES):
        what = f"{job.num_inference_steps} steps; the model was distilled to {len(INDICES)}"
        raise _fault(what, "num_inference_steps", "leave it out")
    if job.guidance_scale != 1:
        what = f"guidance_scale {job.guidance_scale:g}; the model was distilled without guidance"
        raise _fault(what, "guidance_scale", "give 1, or leave it out")
    if job.lora:
        raise _fault("LoRAs are not read for this model", "lora", "take the field out")
    if job.scheduler is not None:
        what = "the model has noise levels of its own"
        raise _fault(what, "scheduler", "take the field out")
    if not job.camera:
        what = "the model follows a camera, and the line says none"
        hint = f'"camera": a file of poses, or keys: "none-{job.num_frames}" stands still'
        raise _fault(what, "camera", hint)
    camera_path(job)


def check_shape(job: VideoJob, card: VideoCard, rule: ChunkRule, positions: int) -> None:
    """Passes a size and a number of frames of whole patches and chunks. Raises JobError."""
    multiple = card.size_multiple
    if any(side < multiple or side % multiple for side in (job.size.height, job.size.width)):
        raise _fault(f"{job.size} is not of multiples of {multiple} pixels", "size", "round it")
    step = rule.frames * card.frame_stride
    least = step - card.frame_stride + 1
    if job.num_frames < least or (job.num_frames - least) % step:
        below = max(0, (job.num_frames - least) // step) * step + least
        what = f"{job.num_frames} frames are not {step} * k + {least}, chunks of {rule.frames} "
        near = f"the nearest are {below} and {below + step}"
        raise _fault(f"{what}latent frames", "num_frames", near)
    most = (positions - 1) * card.frame_stride + 1
    if job.num_frames > most:
        what = f"{job.num_frames} frames; the model knows {most} places in time"
        raise _fault(what, "num_frames", "ask for fewer")


def _fault(what: str, field: str, hint: str) -> JobError:
    return JobError(what, where=field, hint=hint, code=f"job.{field.replace('_', '-')}")
