"""LoRAs for few steps, recognized by their files' names, and the settings that their authors
recommend.
"""

import re

from hyimg_cli.spec.job import ImageJob

# Qwen-Image-Edit-2509-Lightning-4steps-V1.0-bf16.safetensors
_LIGHTNING = re.compile(r"lightning[-_ ]?([0-9]+)[-_ ]?steps", re.IGNORECASE)


def few_steps_advice(job: ImageJob) -> tuple[str, ...]:
    """Return a warning if a job uses such a LoRA with other settings."""
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
