"""From settled settings to the configuration of a run."""

from collections.abc import Mapping
from pathlib import Path

from hyimg_cli.batch.recipe import Setting
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
        ),
        reuse=ReuseConfig(value["kv_reuse"], value["require_kv_reuse"], value["prompt_cache"]),
        batch=BatchConfig(
            value["batching_max_size"],
            value["batch_invariant"],
            value["prefix_cache_mb"],
            value["prefix_cache_host_mb"],
            value["prewarm"],
        ),
        cache=cache,
        parallel=ParallelConfig(
            value["vae_patch_parallel_size"], value["cfg_parallel_size"], value["replicas"]
        ),
        failure=FailurePolicy(value["fail_fast"], value["max_retries"]),
    )
