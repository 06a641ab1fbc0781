"""Warnings about a job, from its kind of pipeline and its LoRAs' names; no torch."""

import re
from contextlib import suppress

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import size_of
from hyimg_cli.models.diffusers_image.kind import LibraryPipeline
from hyimg_cli.spec.job import ImageJob

# A LoRA for few steps: Qwen-Image-Edit-2509-Lightning-4steps-V1.0-bf16.safetensors
_LIGHTNING = re.compile(r"lightning[-_ ]?([0-9]+)[-_ ]?steps", re.IGNORECASE)


def square_advice(kind: LibraryPipeline, base_size: int, job: ImageJob) -> tuple[str, ...]:
    """Return a warning if an edit will not have its source's shape, which nobody asked for."""
    if not (kind.squares and job.images and job.size.is_auto):
        return ()
    with suppress(SourceImageError):  # reported for the file elsewhere
        source = size_of(job.images[0])
        if source.height != source.width:
            what = f"an edit of a {source} source is drawn as a {base_size}x{base_size} square"
            return (f"{what}; infer_align_image_size gives it the source's shape",)
    return ()


def few_steps_advice(job: ImageJob) -> tuple[str, ...]:
    """Return a warning if a job uses a few-step LoRA with other settings than recommended.

    By the LoRA's authors.
    """
    for lora in job.lora:
        name = lora.file.rpartition("/")[2]
        if found := _LIGHTNING.search(name):
            wanted = {"num_inference_steps": int(found[1]), "guidance_scale": 1, "flow_shift": 3}
            others = {one: getattr(job, one) for one in wanted if getattr(job, one) != wanted[one]}
            if others:
                asks = ", ".join(f"{one} {wanted[one]}" for one in others)
                has = ", ".join(f"{value:g}" for value in others.values())
                return (f"{name} was trained for {asks}; this job uses {has}",)
    return ()
