"""The options that commands share, once each: name, help and what their text may be.

Those of `eval` are in `eval_options`, those of `info` and `replay` in `file_options`.

A command's parameters carry the names of the settings they set; `None` means that the flag was not
given. Here the environment is read; `replay` alone reads it another way.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hyimg_cli.cache.disk import KINDS
from hyimg_cli.engine.runner import ResumePolicy, Selection
from hyimg_cli.errors import UsageError
from hyimg_cli.manifest.recipe import Setting, settle
from hyimg_cli.settings.config import configured, refuse_conflicts
from hyimg_cli.settings.table import KNOBS, read_recipe
from hyimg_cli.spec.run import CacheConfig, RunConfig

RUN, MODEL, STYLE = "Run", "Model", "Style"
_SAMPLING, _CHOICE, _VIDEO = "Sampling defaults", "Selection", "Video (t2v)"


def option(*names: str, panel: str, help: str, **more: Any) -> Any:
    """An option in its panel of the help, without a default that would have to be shown."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def folder(text: str) -> Path:
    """The folder that a flag names; an empty name, as of an unset variable, is not this one."""
    if not text:
        raise typer.BadParameter("an empty name; for this folder give .")
    return Path(text)


ManifestPath = Annotated[
    str,
    typer.Argument(
        metavar="MANIFEST",
        help="A .jsonl file with a job per line, a .txt file with a prompt per line, "
        "- for JSONL on standard input, or the name of a packaged manifest: quickstart, "
        "quickstart-video.",
    ),
]
Recipe = Annotated[Path | None, option("--recipe", panel=RUN, help="Settings from a TOML file.")]
OutputDir = Annotated[
    Path | None,
    option(
        "-o",
        "--output-dir",
        panel=RUN,
        parser=folder,
        metavar="<path>",
        help="Folder for results. Default: runs/<manifest>.",
    ),
]
Resume = Annotated[
    bool,
    option("--resume/--no-resume", panel=RUN, help="Leave out what is done already (default)."),
]
RetryFailed = Annotated[
    bool, option("--retry-failed", panel=RUN, help="Run the jobs again that failed before.")
]
Force = Annotated[
    bool, option("--force", panel=RUN, help="Replace results of the same id made otherwise.")
]
FailFast = Annotated[
    bool | None,
    option("--fail-fast/--keep-going", panel=RUN, help="Stop at the first failed job, or go on."),
]
MaxRetries = Annotated[
    int | None,
    option("--max-retries", panel=RUN, min=0, help="Tries after a failure that may pass."),
]
SkipInvalid = Annotated[
    bool | None,
    option("--skip-invalid", panel=RUN, help="Run the good lines, record the bad as failed."),
]
DryRun = Annotated[
    bool, option("--dry-run", panel=RUN, help="Show the plan (as hyimg plan does) and stop.")
]
Metadata = Annotated[
    bool | None,
    option("--metadata/--no-metadata", panel=RUN, help="Write the job into its file."),
]
PromptCache = Annotated[
    bool | None,
    option(
        "--prompt-cache/--no-prompt-cache",
        panel=_VIDEO,
        help="Embed each distinct prompt once, before all jobs (default), or for each job.",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    option(
        "--checkpoint-every",
        panel=_VIDEO,
        min=0,
        help="Keep a video's latents every K denoise steps, so that a killed job goes on. Those "
        "behind the last step are always kept until the video is written.",
    ),
]
FramesName = Annotated[
    str | None,
    option("--frames", panel=_VIDEO, help="png: write every frame without loss too; or none."),
]
VaePatchParallelSize = Annotated[
    int | None,
    option(
        "--vae-patch-parallel-size",
        panel=_VIDEO,
        help="Processes, a GPU each, that share the tiles of a video's decode. Same pixels.",
    ),
]
CfgParallelSize = Annotated[
    int | None,
    option(
        "--cfg-parallel-size",
        panel=_VIDEO,
        help="1, or 2: a process, a GPU each, for each of the two guidance branches. Same pixels.",
    ),
]
Replicas = Annotated[
    int | None,
    option(
        "--replicas",
        panel=RUN,
        help="Processes with a model each, a GPU each, that share the jobs. Same pixels.",
    ),
]
VideoModel = Annotated[
    str | None,
    option(
        "--video-model", panel=MODEL, help="The same for t2v. Default: the embedded tiny-video."
    ),
]
NumFrames = Annotated[
    int | None, option("--num-frames", panel=_VIDEO, help="Frames of a video, 4 k + 1.")
]
Fps = Annotated[int | None, option("--fps", panel=_VIDEO, help="Frames a second in the file.")]
NegativePrompt = Annotated[
    str | None, option("--negative-prompt", panel=_VIDEO, help="What the video should not show.")
]
ContactSheet = Annotated[
    bool | None,
    option("--report/--no-report", panel=RUN, help="Write report.html, a sheet of all jobs."),
]
KvReuse = Annotated[
    bool | None,
    option(
        "--kv-reuse/--no-kv-reuse",
        panel=RUN,
        help="Denoise from the keys and values of the text stage, or compute them again.",
    ),
]
BatchingMaxSize = Annotated[
    int | None,
    option(
        "--batching-max-size",
        panel=RUN,
        min=1,
        help="Jobs that think, and jobs that draw, together at most.",
    ),
]
BatchInvariant = Annotated[
    bool | None,
    option(
        "--batch-invariant/--no-batch-invariant",
        panel=RUN,
        help="Keep a job's pixels equal to the bit in any batch (CPU).",
    ),
]
PrefixCacheMb = Annotated[
    int | None,
    option("--prefix-cache-mb", panel=RUN, min=0, help="K/V kept for prefixes that jobs share."),
]
PrefixCacheHostMb = Annotated[
    int | None,
    option("--prefix-cache-host-mb", panel=RUN, min=0, help="More of them, kept in main memory."),
]
CacheDir = Annotated[
    Path | None,
    option("--cache-dir", panel=RUN, help="Folder of the disk cache. Default: ~/.cache/hyimg."),
]
DiskCache = Annotated[
    bool | None,
    option(
        "--disk-cache/--no-disk-cache",
        panel=RUN,
        help="Keep encoded source images and prompts on disk for later runs (default), or not.",
    ),
]
DiskCacheMb = Annotated[
    int | None,
    option("--disk-cache-mb", panel=RUN, min=0, help="Most that the disk cache may hold."),
]
CacheKind = Annotated[
    str | None, option("--kind", panel=_CHOICE, help=f"Only one kind: {', '.join(KINDS)}.")
]
Prewarm = Annotated[
    bool | None,
    option("--prewarm/--no-prewarm", panel=RUN, help="Run each shape once before it counts."),
]
RequireKvReuse = Annotated[
    bool | None,
    option(
        "--require-kv-reuse/--allow-recompute",
        panel=RUN,
        help="Fail a job whose reuse is not complete.",
    ),
]

Model = Annotated[
    str | None,
    option("--model", panel=MODEL, help="Folder or hub id. Default: the embedded tiny-image."),
]
Revision = Annotated[str | None, option("--revision", panel=MODEL, help="Hub revision.")]
Device = Annotated[
    str | None,
    option("--device", panel=MODEL, help="auto, cpu, cuda, cuda:N, or balanced over all GPUs."),
]
DtypeName = Annotated[str | None, option("--dtype", panel=MODEL, help="auto, float32 or bfloat16.")]
VaeUseTiling = Annotated[
    bool | None,
    option(
        "--vae-use-tiling/--no-vae-use-tiling",
        panel=MODEL,
        help="Decode latents of pictures tile by tile, in bounded memory. Changes pixels near "
        "tile borders.",
    ),
]

Quantization = Annotated[
    str | None,
    option(
        "--quantization",
        panel=MODEL,
        help="none, or the experts of pictures' models in 8 or 4 bits: fp8 or nf4.",
    ),
]
TensorParallelSize = Annotated[
    int | None,
    option(
        "--tensor-parallel-size",
        "--tp-size",
        panel=MODEL,
        help="Processes, a GPU each, that share the layers of a picture's model. Equal within "
        "rounding.",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    option(
        "--gpu-memory-utilization",
        panel=MODEL,
        help="Part of a GPU's memory, above 0 to 1, that the run may use, weights and all.",
    ),
]
EnableCpuOffload = Annotated[
    bool | None,
    option(
        "--enable-cpu-offload/--no-enable-cpu-offload",
        panel=_VIDEO,
        help="Have one of a video model's networks on the GPU at a time, the others in main "
        "memory. Same pixels.",
    ),
]

Steps = Annotated[
    int | None,
    option("--num-inference-steps", "--steps", panel=_SAMPLING, help="Denoise steps."),
]
Guidance = Annotated[
    float | None, option("--guidance-scale", panel=_SAMPLING, help="How hard the prompt pulls.")
]
FlowShift = Annotated[
    float | None, option("--flow-shift", panel=_SAMPLING, help="Shift of the noise schedule.")
]
Seed = Annotated[
    int | None, option("--seed", panel=_SAMPLING, help="Seed of jobs without one of their own.")
]
SizeText = Annotated[
    str | None, option("--size", panel=_SAMPLING, help="auto, WIDTHxHEIGHT or WIDTH:HEIGHT.")
]
BotTaskName = Annotated[
    str | None,
    option("--bot-task", panel=_SAMPLING, help="none, think, recaption or think_recaption."),
]
DropThink = Annotated[
    bool | None,
    option("--drop-think/--keep-think", panel=_SAMPLING, help="Denoise without the think text."),
]
AlignSize = Annotated[
    bool | None,
    option(
        "--infer-align-image-size/--no-infer-align-image-size",
        panel=_SAMPLING,
        help="Edits get their source's aspect ratio.",
    ),
]
SystemPrompt = Annotated[
    str | None, option("--use-system-prompt", panel=_SAMPLING, help="Which system prompt.")
]
SystemPromptText = Annotated[
    str | None, option("--system-prompt", panel=_SAMPLING, help="Text for the custom one.")
]
ArSeed = Annotated[int | None, option("--ar-seed", panel=_SAMPLING, help="Seed of the text stage.")]
Temperature = Annotated[
    float | None, option("--temperature", panel=_SAMPLING, help="Text stage; 0 is greedy.")
]
TopK = Annotated[int | None, option("--top-k", panel=_SAMPLING, help="Text stage; 0 is off.")]
TopP = Annotated[float | None, option("--top-p", panel=_SAMPLING, help="Text stage; 1 is off.")]
MaxNewTokens = Annotated[
    int | None, option("--max-new-tokens", panel=_SAMPLING, help="Longest text to write.")
]

Select = Annotated[
    str | None, option("--select", panel=_CHOICE, help="Only ids that match this pattern.")
]
Limit = Annotated[
    int | None, option("--limit", panel=_CHOICE, min=1, help="Only the first N of the jobs.")
]
Shard = Annotated[
    str | None, option("--shard", panel=_CHOICE, help="I/N: every N-th job, from the I-th on.")
]

AsJson = Annotated[
    bool, option("--json", panel=STYLE, help="Results as JSON lines on standard output.")
]
Quiet = Annotated[bool, option("-q", "--quiet", panel=STYLE, help="Only errors and failed jobs.")]
Verbose = Annotated[int, option("-v", "--verbose", panel=STYLE, count=True, help="Say more.")]
Progress = Annotated[
    str, option("--progress", panel=STYLE, help="auto (default), rich, plain or none.")
]
AssumeThink = Annotated[
    int,
    option("--assume-think", panel=STYLE, min=0, help="Tokens a text stage is taken to write."),
]


def settings_of(given: Mapping[str, Any]) -> dict[str, Setting]:
    """Every setting with its value and origin, from flags, environment and recipe."""
    recipe = read_recipe(Path(given["recipe"])) if given.get("recipe") else {}
    flags = {knob.name: _flag(given[knob.name]) for knob in KNOBS if knob.name in given}
    settings = settle(flags, os.environ, recipe)
    refuse_conflicts(settings)
    return settings


def selection_of(given: Mapping[str, Any]) -> Selection:
    """Which jobs of the manifest are meant."""
    return Selection(given["select"], given["limit"], _shard(given["shard"]))


def output_folder(
    given: Mapping[str, Any], settings: Mapping[str, Setting], manifest_name: str
) -> Path:
    """Where results go: as asked, else under `runs`, each shard in a folder of its own."""
    if settings["output_dir"].value is not None:
        return Path(settings["output_dir"].value)
    shard = f"-shard-{given['shard'].replace('/', '-of-')}" if given["shard"] else ""
    return Path("runs") / f"{manifest_name}{shard}"


def cache_folder(settings: Mapping[str, Setting]) -> Path | None:
    """Where the disk cache lies: as asked, else in the user's own; None where there is none."""
    given, shared = settings["cache_dir"].value, Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if given is not None:
            return Path(given).expanduser()
        # A relative one is to be ignored, says the XDG specification.
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "hyimg"
    except RuntimeError:  # a user without a home
        return None


def cache_config(settings: Mapping[str, Setting]) -> CacheConfig:
    """What is kept on disk from one run to the next."""
    folder = cache_folder(settings) if settings["disk_cache"].value else None
    return CacheConfig(folder, settings["disk_cache_mb"].value)


def resume_policy_of(given: Mapping[str, Any]) -> ResumePolicy:
    """What an earlier run in the same folder means."""
    return ResumePolicy(given["resume"], given["retry_failed"], given["force"])


def run_config(settings: Mapping[str, Setting], folder: Path) -> RunConfig:
    """The run that the settings describe, with results in `folder`."""
    return configured(settings, folder, cache_config(settings))


def whole_numbers(text: str, *, flag: str) -> tuple[int, ...]:
    """`1,8,50` as numbers from 1 on. Raises UsageError."""
    if not re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", text):
        what = f"{flag} {text!r} is no list of whole numbers"
        raise UsageError(what, hint=f"for example {flag} 1,8,50")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def _flag(value: Any) -> Any:
    """A flag's value as `settle` takes it: text, number, truth, or None."""
    return str(value) if isinstance(value, Path) else value


def _shard(text: str | None) -> tuple[int, int] | None:
    """`2/4` as (2, 4), counted from 1."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard {text!r} is not I/N with I from 1 to N", hint="for example --shard 2/4"
        )
    return int(match[1]), int(match[2])
