"""diffusers' step caches (`transformer.enable_cache`) as far as a runner must know them."""

from typing import Any

from hyimg_cli.errors import JobError


def forget(network: Any) -> None:
    """Empty the network's step cache: the library does so only behind a run that succeeded."""
    if network.is_cache_enabled:
        network._reset_stateful_cache()


def refuse_checkpoint(network: Any) -> None:
    """A step cache's memory is the library's own business. Raises JobError where one is on."""
    if network.is_cache_enabled:
        raise JobError(
            "latents cannot be checkpointed while a step cache is on",
            hint="its memory is not kept; run without the step cache or without checkpoints",
            code="job.step-cache",
        )
