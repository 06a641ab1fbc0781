"""From settled settings to the configuration of a run."""

from collections.abc import Mapping
from pathlib import Path

from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.recipe import Setting
from hyimg_cli.spec.run import (
    BatchConfig,
    CacheConfig,
    FailurePolicy,
    ModelChoice,
    OutputConfig,
    ParallelConfig,
    ReuseConfig,
    RunConfig,
)

_LARGE = "replicas do more jobs at once, ranks one job sooner"
_RANKS = ("tensor_parallel_size", "vae_patch_parallel_size", "cfg_parallel_size")


def refuse_conflicts(settings: Mapping[str, Setting]) -> None:
    """Raises UsageError where replicas are asked for, and a GPU each cannot be what they get."""
    count = settings["replicas"].value
    if count == 1:
        return
    device = settings["device"].value
    if device == "balanced" or device.startswith("cuda:"):
        raise _not_with_replicas(count, f"--device {device}", "--device cuda: a GPU each")
    for name in _RANKS:
        ranks = settings[name].value
        if ranks > 1:
            flag = f"--{name.replace('_', '-')}"
            raise _not_with_replicas(count, f"{flag} {ranks}", f"one of the two; {_LARGE}")


def _not_with_replicas(count: int, other: str, hint: str) -> UsageError:
    what = f"--replicas {count} does not go with {other}"
    return UsageError(what, hint=f"give {hint}", code="usage.replicas")


def configured(settings: Mapping[str, Setting], folder: Path, cache: CacheConfig) -> RunConfig:
    """The run that the settings describe, with results in `folder`."""
    value = {name: setting.value for name, setting in settings.items()}
    return RunConfig(
        output=OutputConfig(folder, value["metadata"], value["frames"], value["checkpoint_every"]),
        model=ModelChoice(
            value["model"],
            value["revision"],
            value["dtype"],
            value["device"],
            value["vae_use_tiling"],
            value["quantization"],
            value["decode_graphs"],
            value["enable_cpu_offload"],
        ),
        reuse=ReuseConfig(value["kv_reuse"], value["require_kv_reuse"], value["prompt_cache"]),
        batch=BatchConfig(
            value["batching_max_size"],
            value["batch_invariant"],
            value["prefix_cache_mb"],
            value["prefix_cache_host_mb"],
            value["prewarm"],
            memory_gb=value["memory_gb"],
            gpu_memory_utilization=value["gpu_memory_utilization"],
        ),
        cache=cache,
        parallel=ParallelConfig(
            value["vae_patch_parallel_size"],
            value["cfg_parallel_size"],
            value["tensor_parallel_size"],
            value["replicas"],
        ),
        failure=FailurePolicy(value["fail_fast"], value["max_retries"]),
    )
