"""What `generate`, `plan` and `check` take: one list, so that each reads the others' command line.

`check` and `plan` refuse what `generate` would refuse; flags that only matter once jobs run change
nothing there.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from hyimg_cli.cli import options as o

Command = Callable[[typer.Context], None]


class RunOptions:
    """The options in the order of the help, each with what it is where it is not given."""

    manifest: o.ManifestPath
    output_dir: o.OutputDir = None
    recipe: o.Recipe = None
    resume: o.Resume = True
    retry_failed: o.RetryFailed = False
    force: o.Force = False
    fail_fast: o.FailFast = None
    max_retries: o.MaxRetries = None
    skip_invalid: o.SkipInvalid = None
    dry_run: o.DryRun = False
    metadata: o.Metadata = None
    report: o.ContactSheet = None
    kv_reuse: o.KvReuse = None
    require_kv_reuse: o.RequireKvReuse = None
    batching_max_size: o.BatchingMaxSize = None
    batch_invariant: o.BatchInvariant = None
    prefix_cache_mb: o.PrefixCacheMb = None
    prefix_cache_host_mb: o.PrefixCacheHostMb = None
    cache_dir: o.CacheDir = None
    disk_cache: o.DiskCache = None
    disk_cache_mb: o.DiskCacheMb = None
    prewarm: o.Prewarm = None
    select: o.Select = None
    limit: o.Limit = None
    shard: o.Shard = None
    model: o.Model = None
    video_model: o.VideoModel = None
    revision: o.Revision = None
    device: o.Device = None
    dtype: o.DtypeName = None
    vae_use_tiling: o.VaeUseTiling = None
    quantization: o.Quantization = None
    tensor_parallel_size: o.TensorParallelSize = None
    gpu_memory_utilization: o.GpuMemoryUtilization = None
    num_inference_steps: o.Steps = None
    guidance_scale: o.Guidance = None
    flow_shift: o.FlowShift = None
    seed: o.Seed = None
    size: o.SizeText = None
    bot_task: o.BotTaskName = None
    drop_think: o.DropThink = None
    infer_align_image_size: o.AlignSize = None
    use_system_prompt: o.SystemPrompt = None
    system_prompt: o.SystemPromptText = None
    ar_seed: o.ArSeed = None
    temperature: o.Temperature = None
    top_k: o.TopK = None
    top_p: o.TopP = None
    max_new_tokens: o.MaxNewTokens = None
    num_frames: o.NumFrames = None
    fps: o.Fps = None
    negative_prompt: o.NegativePrompt = None
    prompt_cache: o.PromptCache = None
    enable_cpu_offload: o.EnableCpuOffload = None
    vae_patch_parallel_size: o.VaePatchParallelSize = None
    cfg_parallel_size: o.CfgParallelSize = None
    replicas: o.Replicas = None
    checkpoint_every: o.CheckpointEvery = None
    frames: o.FramesName = None
    assume_think: o.AssumeThink = 256
    progress: o.Progress = "auto"
    as_json: o.AsJson = False
    quiet: o.Quiet = False
    verbose: o.Verbose = 0


def takes_run_options(command: Command) -> Callable[..., None]:
    """`command` with the run options as its parameters, for typer; it reads `ctx.params`."""

    @wraps(command)
    def called(ctx: typer.Context, **_: Any) -> None:
        command(ctx)

    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(
            name,
            kind,
            annotation=annotation,
            default=getattr(RunOptions, name, inspect.Parameter.empty),
        )
        for name, annotation in inspect.get_annotations(RunOptions).items()
    ]
    context = inspect.Parameter("ctx", kind, annotation=typer.Context)
    called.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    return called
