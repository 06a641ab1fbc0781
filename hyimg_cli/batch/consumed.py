"""Settings that concern one kind of job, and which of them no job of a manifest reads."""

from collections.abc import Iterator, Mapping, Sequence

from hyimg_cli.batch.layers import Setting
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

OF_PICTURES = (
    "model",
    "vae_use_tiling",
    "quantization",
    "bot_task",
    "drop_think",
    "use_system_prompt",
    "system_prompt",
    "ar_seed",
    "temperature",
    "top_k",
    "top_p",
    "max_new_tokens",
    "infer_align_image_size",
    "kv_reuse",
    "require_kv_reuse",
    "batching_max_size",
    "batch_invariant",
    "prefix_cache_mb",
    "prefix_cache_host_mb",
    "tensor_parallel_size",
)
OF_VIDEOS = (
    "video_model",
    "negative_prompt",
    "num_frames",
    "fps",
    "guidance_scale_2",
    "prompt_cache",
    "vae_patch_parallel_size",
    "cfg_parallel_size",
    "frames",
    "checkpoint_every",
)
_KINDS = (("pictures", ImageJob, OF_PICTURES), ("videos", VideoJob, OF_VIDEOS))
# Flags that are not switched off by a `no` in front.
_OFF = {"require_kv_reuse": "--allow-recompute", "drop_think": "--keep-think"}


def without_effect(settings: Mapping[str, Setting], jobs: Sequence[Job]) -> Iterator[str]:
    """A sentence for each kind of job that settings were given for and `jobs` has none of."""
    for noun, kind, names in _KINDS:
        if not jobs or any(isinstance(job, kind) for job in jobs):
            continue
        asked = (settings[name] for name in names)
        found = [_as_given(one) for one in asked if one.origin not in ("default", "model")]
        if found:
            verb = "concerns" if len(found) == 1 else "concern"
            yield f"{', '.join(found)} {verb} {noun} only; this manifest has none"


def _as_given(setting: Setting) -> str:
    """What the user wrote: the flag, the variable, or the recipe's key."""
    if setting.origin == "environment":
        return f"HYIMG_{setting.name.upper()}"
    if setting.origin == "recipe":
        return f"{setting.name} of the recipe"
    name = setting.name.replace("_", "-")
    return _OFF.get(setting.name, f"--no-{name}") if setting.value is False else f"--{name}"
