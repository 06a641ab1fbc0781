"""A resolved job as a manifest line: for `manifest.resolved.jsonl`, the resume key and the PNG."""

import json
from typing import Any

from hyimg_cli.spec.job import ImageJob, SizeRequest


def job_to_json(job: ImageJob) -> dict[str, Any]:
    """The job as a manifest line that says everything: read back, it gives the same job.

    Fields that no stage would consume are left out; `images` stand as the job has them.
    """
    entry: dict[str, Any] = {
        "custom_id": job.custom_id,
        "task": job.task,
        "prompt": job.prompt,
        **({"images": list(job.images)} if job.images else {}),
        "model": job.model,
        "seed": job.seed,
        "size": size_text(job.size),
        "num_inference_steps": job.num_inference_steps,
        "guidance_scale": job.guidance_scale,
        "flow_shift": job.flow_shift,
        **_text_fields(job),
        "use_system_prompt": job.use_system_prompt,
    }
    if job.system_prompt is not None:
        entry["system_prompt"] = job.system_prompt
    if job.metadata_json != "null":
        entry["metadata"] = json.loads(job.metadata_json)
    entry.update(json.loads(job.extra_json))
    return entry


def _text_fields(job: ImageJob) -> dict[str, Any]:
    """What bears on the text before the picture, for a job that has such text."""
    if job.cot_text is not None:
        return {"cot_text": job.cot_text, "drop_think": job.drop_think}
    if job.cot_token_ids is not None:
        return {"cot_token_ids": list(job.cot_token_ids), "drop_think": job.drop_think}
    if not job.writes_text:
        return {"bot_task": job.bot_task}
    sampling = job.text
    return {
        "bot_task": job.bot_task,
        "drop_think": job.drop_think,
        "ar_seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
    }


def size_text(size: SizeRequest) -> str:
    """The request as a manifest writes it; a ratio of small numbers as `W:H`."""
    if size.is_auto or min(size.height, size.width) >= 16:
        return str(size)
    return f"{size.width}:{size.height}"
