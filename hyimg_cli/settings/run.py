"""How a run is carried out: everything that is not part of a job.

A field with a `Declaration` is a setting: its flag, variable, key in a recipe, help, schema and
part of the resume key follow from it (`settings.table`). What the setting means is said once, in
its help; a comment above it has what only this code needs. Fields are given by name; only the main
field of a class may be given by position.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Interval

from hyimg_cli.settings.kinds import (
    DEVICE,
    DURATION,
    FOLDER,
    GATES,
    NAMES,
    RUN_FOLDER,
    SCORER_NAMES,
    SCORER_OPTIONS,
    SHARE,
    SIZE,
)
from hyimg_cli.settings.name_template import NAME_TEMPLATE
from hyimg_cli.settings.paths import MODEL_NAME
from hyimg_cli.spec import options as o
from hyimg_cli.spec.job import BY_ID, Format, SizeRequest

JobKind = Literal["pictures", "videos"]
# Jobs that read a setting, or kinds of models; `latents`: models that only denoise latents.
Readers = Literal[JobKind, "latents", "text", "batches", "negative", "pair", "camera"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "fp8", "nf4"]
Graphs = Literal["auto", "on", "off"]
VaeDtype = Literal["auto", "float32", "float16"]
Offloading = Literal["none", "model", "group"]
DecodeTiles = Literal["auto", "own", "half"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
OFFLOADS: tuple[Offloading, ...] = get_args(Offloading)
DECODE_TILES: tuple[DecodeTiles, ...] = get_args(DecodeTiles)
# Names of diffusers' AttentionBackendName, without the ones for NPUs and XLA. The first ones can
# split a video's tokens over ranks.
_Split = Literal["native", "_native_cudnn", "_native_flash", "flash", "flash_hub"]
_SplitHub = Literal["flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "sage", "sage_hub"]
_Native = Literal["_native_efficient", "_native_math", "flex", "xformers"]
_Flash = Literal["flash_varlen", "aiter_fa2_hub", "_flash_3", "_flash_varlen_3", "flash_4_hub"]
_Sage = Literal["sage_blackwell_hub", "sage_varlen"]
_SageFp8 = Literal["_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"]
_SageFp16 = Literal["_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"]
AttentionBackend = Literal[_Split, _SplitHub, _Native, _Flash, _Sage, _SageFp8, _SageFp16]
CONTEXT_BACKENDS: tuple[str, ...] = get_args(Literal[_Split, _SplitHub])


# Number of processes, or of clips, that share work.
MOST_TOGETHER = 64
Together = Annotated[int, Interval(ge=1, le=MOST_TOGETHER)]
Megabytes = Annotated[int, Interval(ge=0, le=10**7)]


_run, _model = partial(o.option, panel=o.RUN), partial(o.option, panel=o.MODEL)
# Settings of every command that loads a model.
_each_model = partial(_model, commands=("doctor", "bench", "replay"))
_candidates = partial(o.option, panel=o.CANDIDATES)
_scored = partial(_candidates, commands=("bench",))
_kept = partial(_run, commands=("doctor", "replay"))
_run_of_pictures = partial(_run, only="pictures")
_replayed_of_pictures = partial(_run_of_pictures, commands=("replay",))
_checked_run = partial(_run, commands=("doctor",))
_model_of_pictures = partial(_model, only="pictures")
_weights = partial(_model, pixels="checkpoint", commands=("doctor", "bench"))
_served = partial(o.option, only="pictures", commands=("serve",))
_encoding = partial(_run_of_pictures, in_line=True, pixels="job")
_video = partial(o.option, panel=o.VIDEO, only="videos")
_latents = partial(o.option, panel=o.MODEL, only="latents")
_ranks = partial(_model, 1, commands=("doctor", "replay"))
_video_without_flag = partial(o.option, only="videos")
_video_ranks = partial(_video, 1, commands=("replay",))


@dataclass(frozen=True, eq=False)
class InKey:
    """How a setting that changes pixels is written in the resume key.

    `name`: its name there; `of_videos`: its name in a video's key, if different. `words`: a word
    for each value; without it, each value but the default is its own word. A value without a word
    is not written, so keys from before the setting existed stay valid.
    """

    name: str
    words: Mapping[Any, str] | None = None
    of_videos: str = ""


@dataclass(frozen=True)
class MachineInfo:
    """Facts about a machine that decide the device, dtype and graphs for "auto"."""

    has_gpu: bool
    has_triton: bool


@dataclass(frozen=True)
class CacheConfig:
    """The disk cache, kept between runs; without a `folder` nothing is cached."""

    folder: Annotated[Path, FOLDER] | None = _kept(
        None, "Disk cache folder. Default: ~/.cache/hyimg.", name="cache_dir"
    )
    _: KW_ONLY
    disk_cache: bool = _kept(True, "Cache encoded source images and prompts on disk.")
    budget_mb: Annotated[int, Interval(ge=0, le=10**9)] = _checked_run(
        10240, "Maximum size of the disk cache, in MB.", name="disk_cache_mb"
    )
    keeps_weights: bool = _run_of_pictures(
        False,
        "Cache quantized weights on disk, so that the next start reads half as much.",
        name="keep_quantized",
    )

    @property
    def budget_bytes(self) -> int:
        return self.budget_mb * 1_000_000


@dataclass(frozen=True)
class ModelChoice:
    """The weights, where they run, and their precision."""

    model: str = _weights(
        "tiny-image", "Model folder, file or hub id.", is_basic=True, only="pictures"
    )
    _: KW_ONLY
    components: Annotated[str, MODEL_NAME] | None = _model(
        None,
        "Folder or hub id with all other parts of a model that is one file.",
        only="pictures",
        pixels="checkpoint",
        commands=("doctor", "bench", "replay"),
    )
    video_model: str = _weights("tiny-video", "Folder or hub id of the video model.", only="videos")
    video_components: Annotated[str, FOLDER] | None = _video(
        None,
        "Folder with the text encoder and VAE of a video model that lacks them.",
        pixels="checkpoint",
        commands=("doctor", "bench", "replay"),
    )
    allow_model: Annotated[tuple[str, ...], NAMES] | None = _model(
        None,
        "Allow lines to name only these models and LoRAs, and those of --model and --video-model.",
    )
    revision: str | None = _each_model(
        None, "Revision on the hub: branch, tag or commit.", pixels="checkpoint"
    )
    dtype: Dtype = _each_model(
        "auto", "Precision of weights and computation.", pixels=InKey("dtype")
    )
    # `auto`, `cpu`, `cuda`, `cuda:N` or `balanced`.
    device: Annotated[str, DEVICE] = _each_model(
        "auto", "Device to run on; balanced uses all GPUs.", is_basic=True
    )
    # Of pictures and of videos; `decode_tiles` counts whatever this one is.
    vae_use_tiling: bool | None = _model(
        None,
        "Decode in tiles to limit memory; changes pixels at tile borders. Default: only for "
        "videos.",
        pixels=InKey("vae", {True: "tiled", False: "whole"}),
        commands=("doctor", "replay"),
    )
    # The weights are in float32: `float16` decodes under autocast, `float32` in full precision, and
    # `auto` in float16 on a GPU where upstream does so, else in float32 (TF32 on a GPU).
    vae_dtype: VaeDtype = _model_of_pictures(
        "auto",
        "Precision of the VAE of pictures; auto decodes in float16 on a GPU, as the official "
        "code does.",
        pixels=InKey("vae_dtype"),
    )
    # The routed experts of a picture model, the transformer of a video model.
    quantization: Quantization = _each_model(
        "none",
        "Quantize the weights.",
        is_basic=True,
        pixels=InKey("experts", of_videos="transformer"),
    )
    offloads_experts: bool = _model_of_pictures(
        False,
        "Keep experts, and the VAE while it is idle, in main memory, for GPUs that cannot "
        "hold them.",
        name="offload_experts",
        commands=("doctor",),
    )
    cpu_offload: Offloading = _latents(
        "none",
        "Keep diffusers networks in main memory: model moves one network at a time to the "
        "GPU, group one transformer block. Same pixels.",
    )
    enable_cpu_offload: bool = _latents(False, "Same as --cpu-offload model.", commands=("doctor",))
    auto_fit: bool = _latents(
        True,
        "Take the fastest --cpu-offload with which a diffusers model fits, if none is given.",
        commands=("doctor",),
    )
    attention_backend: AttentionBackend = o.option(
        "native",
        "Attention kernel of diffusers transformers.",
        only="latents",
        also_variable="DIFFUSERS_ATTN_BACKEND",
        pixels=InKey("attention_backend", of_videos="attention"),
    )
    compile_blocks: bool = _latents(
        False,
        "Compile transformer blocks with torch.compile, at the first step of each shape.",
        pixels=InKey("blocks", {True: "compiled"}),
    )
    decode_tiles: DecodeTiles = _video_without_flag(
        "auto",
        "Tile size of the video decode: the model's own, or half per side to save memory.",
        pixels=InKey("decode"),
    )
    decode_graphs: Graphs = o.option(
        "auto",
        "Decode text with CUDA graphs; auto does where supported. Rounding differs.",
        spellings={True: "on", False: "off"},
        only="pictures",
        pixels=InKey("text", {"on": "graphs"}),
    )
    deterministic: bool = _model(
        False,
        "Use only deterministic algorithms, and fail where an operation has none.",
        pixels=InKey("algorithms", {True: "deterministic"}),
        commands=("doctor",),
    )
    # Bytes of experts on the GPU beside two layers of them, with `offloads_experts`.
    expert_room: int = 0
    # The machine that does the work; None: this one.
    machine: MachineInfo | None = None
    # Where quantized weights are kept for the next start; None: nowhere.
    weights_cache: CacheConfig | None = None

    def kind(self, *, has_gpu: bool) -> Literal["cpu", "cuda"]:
        """Return the kind of device that is asked for, on a machine with or without a GPU."""
        return "cpu" if self.device == "cpu" or (self.device == "auto" and not has_gpu) else "cuda"

    @property
    def tiles_videos(self) -> bool:
        """True unless tiling is off.

        Then start pictures are encoded, and videos by default decoded, in tiles.
        """
        return self.vae_use_tiling is not False

    @property
    def tiles_decodes(self) -> bool:
        """True unless videos are decoded whole."""
        return self.tiles_videos or self.decode_tiles != "auto"

    def dtype_on(self, kind: str) -> str:
        """Return the dtype on a kind of device; default: float32 on the CPU, bfloat16 on a GPU."""
        by_default = "float32" if kind == "cpu" else "bfloat16"
        return by_default if self.dtype == "auto" else self.dtype

    def wants_graphs(self, *, on_one_gpu: bool, has_triton: bool) -> bool:
        """Return True if one process decodes text with CUDA graphs.

        Decided only here, because resume keys need it before anything is loaded.
        """
        if self.decode_graphs == "auto":
            return on_one_gpu and has_triton and not self.offloads_experts
        return self.decode_graphs == "on"


@dataclass(frozen=True, kw_only=True)
class Sampling(o.VideoOptions, o.TextSampling, o.PictureOptions, o.JobOptions):
    """The jobs that a line becomes, and how each is sampled.

    None means the checkpoint's default.
    """

    size: Annotated[SizeRequest, SIZE] = o.sampling_option(
        SizeRequest(), "Output size.", is_basic=True
    )
    n: Annotated[int, Interval(ge=1, le=1000)] = o.sampling_option(
        1, "Number of results per line.", aliases=("num_outputs_per_prompt",)
    )
    vary: Literal["picture", "text", "both"] = o.sampling_option(
        "both", "Choose which seed differs between the results of a line.", only="pictures"
    )


@dataclass(frozen=True, kw_only=True)
class Outside(o.KeepOutside):
    """Whether and how an edit keeps its source outside, and what is drawn for it.

    By the last three, a job's crop and size are chosen; it has no other trace of them.
    """

    keep_outside: bool = o.outside_option(False, "Keep all pixels outside the edit.", is_basic=True)
    region_size: Literal["auto", "fit", "native"] = o.outside_option(
        "auto",
        "Draw the whole source (fit), or only the region with its surroundings, near the source's "
        "own resolution (native). auto: native if the whole would be drawn at more than 1.5 "
        "source pixels per pixel. Without a region, native finds it by a draft.",
    )
    region_context: Annotated[float, Interval(ge=0, le=4)] | None = o.outside_option(
        None,
        "Surroundings drawn on each side of the region, as a part of its long side. Default: 0.5, "
        "less where that gives the source's own resolution.",
    )
    region_pixels: Annotated[float, Interval(ge=0.05, le=8)] | None = o.outside_option(
        None, "Megapixels of a crop as it is drawn. Default: the model's own size."
    )


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """Reuse of keys, values and prompts."""

    kv_reuse: bool = _replayed_of_pictures(
        True,
        "Reuse the text stage's keys and values when denoising.",
        pixels=InKey("kv_reuse", {True: "reuse", False: "recompute"}),
    )
    required: bool = _run_of_pictures(
        False,
        "Fail jobs that cannot reuse all keys and values.",
        name="require_kv_reuse",
        flags=("--require-kv-reuse/--allow-recompute",),
    )
    prompt_cache: bool = _latents(
        True, "Encode each distinct prompt once, before the first job.", panel=o.RUN
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes, and what jobs in a batch share."""

    # Fewer jobs run together where memory is short.
    max_size: Annotated[int, Interval(ge=1, le=1024)] = _checked_run(
        16,
        "Maximum batch size, for text and for denoising.",
        name="batching_max_size",
        only="batches",
    )
    is_invariant: bool = _replayed_of_pictures(
        True,
        "Keep a job's pixels independent of its batch, to the bit (CPU); diffusers image models "
        "draw jobs one at a time.",
        name="batch_invariant",
        only="batches",
        commands=("replay", "bench"),
        pixels=InKey("batch", {False: "variant"}),
    )
    prefix_cache_mb: Megabytes = _run_of_pictures(
        4096, "Memory for the K/V of shared prefixes, in MB."
    )
    prefix_cache_host_mb: Megabytes = _run_of_pictures(
        0, "Main memory for further prefixes, in MB."
    )
    clips: Together = _video(
        1,
        "Denoise this many clips together, in models that follow a camera. Rounding differs.",
        name="clips_together",
        only="camera",
        pixels=InKey("clips", {n: f"{n} together" for n in range(2, MOST_TOGETHER + 1)}),
    )
    prewarm: bool | None = _run(
        None, "Run each shape once before the first job. Default: on a GPU, and for a server."
    )
    background_pass: Annotated[int, Interval(ge=1, le=10_000)] = _served(
        8, "Advance batches on every Nth pass while a single request runs; 1 means every pass."
    )
    tokens_between_steps: Annotated[int, Interval(ge=1, le=1024)] = _served(
        4, "Text tokens to write between two denoise steps."
    )
    # Encode the next jobs' source images while the model works. None: if that suits the device, and
    # its memory is not short of experts.
    prefetches_sources: bool | None = None
    # Includes weights. Where the next one is given too, the smaller one counts.
    memory_gb: Annotated[float, Interval(gt=0, le=10**5)] | None = o.option(
        None, "Memory to plan for, in GB. Default: this machine's.", only="pictures"
    )
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] | None = _model(
        None,
        "Fraction of a GPU's memory that the run may use, including weights.",
        commands=("doctor",),
    )

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else round(self.memory_gb * 1_000_000_000)


@dataclass(frozen=True)
class OutputConfig:
    """Where results go, and what their files contain."""

    folder: Annotated[Path, RUN_FOLDER] = _run(
        MISSING,
        "Folder, address or file. Default: runs/<manifest>.",
        name="output_dir",
        is_basic=True,
        flags=("-o", "--output", "--output-dir"),
    )
    _: KW_ONLY
    format: Format = _encoding(
        "png",
        "Image format.",
        spellings={"jpg": "jpeg"},
        is_basic=True,
        aliases=("output_format",),
    )
    quality: Annotated[int, Interval(ge=1, le=100)] = _encoding(
        95, "JPEG or lossy WebP quality.", aliases=("output_compression",)
    )
    lossless: bool = _encoding(False, "Write lossless WebP.")
    name: Annotated[str, NAME_TEMPLATE] = _run(
        BY_ID,
        "Template for file names: custom_id, stem, folder, index, seed.",
        is_basic=True,
        in_line=True,
    )
    metadata: bool = _run(True, "Write the job and an AI mark into each file.")
    keep_gps: bool = o.option(
        False, "Keep the GPS position in the source's EXIF.", panel=o.OUTSIDE, only="pictures"
    )
    frames: Literal["none", "png"] = _video(
        "none", "Also write every frame of a video as PNG.", commands=("replay",)
    )
    checkpoint_every: Annotated[int, Interval(ge=0, le=1000)] = _run(
        10,
        "Save latents every K denoise steps, to resume a killed job; 0 saves only the final "
        "ones, until the file is written.",
    )
    report: bool = _run(True, "Write report.html, a page with all jobs.")
    # A job ends with its text, and nothing is drawn.
    only_texts: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The processes over which the work is spread."""

    vae_ranks: Together = _video_ranks(
        "Split a video's decode over this many processes, one GPU each. Same pixels.",
        name="vae_patch_parallel_size",
    )
    cfg_ranks: Annotated[int, Interval(ge=1, le=2)] = _ranks(
        "Split the guidance branches over this many GPUs, or groups of "
        "--tensor-parallel-size GPUs. Same pixels.",
        name="cfg_parallel_size",
    )
    context_ranks: Together = _video_ranks(
        "Split a video's tokens over this many processes, one GPU each. Equal within rounding.",
        name="context_parallel_size",
        pixels=InKey("context", {n: f"{n} ranks" for n in range(2, MOST_TOGETHER + 1)}),
    )
    tensor_ranks: Together = _ranks(
        "Split a picture model's layers over this many processes, one GPU each. Equal within "
        "rounding.",
        name="tensor_parallel_size",
        only="pictures",
        flags=("--tensor-parallel-size", "--tp-size"),
        pixels=InKey("layers", {n: f"{n} ranks" for n in range(2, MOST_TOGETHER + 1)}),
    )
    replicas: Annotated[int, Interval(ge=1, le=4096)] = _checked_run(
        1, "Run this many copies of the model, each in a process with its own GPUs. Same pixels."
    )
    ray_address: str | None = _run(
        None, "Run replicas on a Ray cluster: its address, auto, or local to start one here."
    )

    @property
    def ranks(self) -> int:
        """Number of processes for a video, including this one."""
        return max(self.vae_ranks, self.step_ranks)

    @property
    def step_ranks(self) -> int:
        """Number of these processes that hold the transformer."""
        return max(self.cfg_ranks, self.context_ranks)

    @property
    def picture_ranks(self) -> int:
        """Number of processes for a picture, including this one."""
        return self.tensor_ranks * self.cfg_ranks

    @property
    def has_replicas(self) -> bool:
        """True if sessions run in other processes."""
        return self.replicas > 1 or self.ray_address is not None

    @property
    def of_session(self) -> int:
        """Number of processes, with one GPU each, that a session needs for any job."""
        return max(self.ranks, self.picture_ranks)


@dataclass(frozen=True, kw_only=True)
class CandidatesConfig:
    """How the results of a line are scored, and how the best are picked."""

    draft_steps: Annotated[int, Interval(ge=1, le=1000)] | None = _candidates(
        None, "Draw every candidate in this many steps, and only the picked ones in full."
    )
    score: Annotated[tuple[str, ...], SCORER_NAMES] = _scored(
        (),
        "Scorers: confidence, outside, text, ask:QUESTION, judge:MODEL, MODULE:FUNCTION or "
        "FILE.py:FUNCTION. "
        "NAME=SCORER renames one.",
    )
    score_python: Annotated[tuple[str, ...], NAMES] = _scored(
        (), "Python of a scorer's own environment: NAME=PATH."
    )
    score_option: Annotated[tuple[str, ...], SCORER_OPTIONS] = _scored(
        (), "Option of a scorer: NAME.KEY=VALUE. Other options are other scores."
    )
    repeat: Annotated[int, Interval(ge=1, le=100)] = _scored(
        1, "Scores of each candidate by scorers whose scores can differ, such as a judge."
    )
    score_timeout: Annotated[float, Interval(gt=0, le=86400)] = _scored(
        300.0, "Seconds that a scorer may take for a batch of 8 candidates."
    )
    judge_url: str | None = _scored(
        None, "OpenAI-compatible endpoint of the judge. Its key is read from HYIMG_JUDGE_KEY."
    )
    rubric: Annotated[str, FOLDER] | None = _scored(
        None,
        "File with the judge's instructions; they must ask for JSON with the keys follows, quality "
        "and, for edits, preserves. Default: hyimg's own.",
    )
    keep: Annotated[int, Interval(ge=1, le=1000)] = _candidates(
        1, "Candidates to pick from each line.", flags=("--pick", "--keep")
    )
    least: Annotated[tuple[str, ...], GATES] = _candidates(
        (), "Minimum to accept: SCORER=NUMBER or SCORER.PART=NUMBER.", name="min"
    )
    most: Annotated[tuple[str, ...], GATES] = _candidates(
        (), "Maximum to accept: SCORER=NUMBER or SCORER.PART=NUMBER.", name="max"
    )

    @property
    def is_asked_for(self) -> bool:
        """True for a run of candidates, or for settings that mean one."""
        return bool(self.score or self.draft_steps or self.repeat > 1)


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What to do about failed jobs, and when a run ends early."""

    fail_fast: bool = _run(
        False,
        "Stop at the first failed job, or keep going (default).",
        flags=("--fail-fast/--keep-going",),
    )
    max_consecutive_errors: Annotated[int, Interval(ge=0, le=1_000_000)] = _run(
        20, "Stop after this many errors in a row, not counting unreadable sources; 0 never stops."
    )
    halt: Annotated[str, SHARE] | None = _run(None, "Stop when so many jobs failed.", is_basic=True)
    time_limit: Annotated[str, DURATION] | None = _run(
        None, "Stop in order after this time.", is_basic=True
    )
    job_timeout: Annotated[str, DURATION] | None = _run(
        None, "Fail a job that works longer.", is_basic=True
    )
    max_retries: Annotated[int, Interval(ge=0, le=100)] = _run(
        0, "Retry a job up to this many times after a failure that may be temporary."
    )
    skip_invalid: bool = _run(
        False, "Run the valid lines and record the others as failed.", flags=("--skip-invalid",)
    )

    def for_run(self, jobs: int, failed: int = 0) -> "FailurePolicy":
        """Return the policy with `halt` as the number of failures that ends a run of so many jobs.

        `failed`: jobs of the run that have failed already. No change if it is a number by then.
        """
        if self.halt is None:
            return self
        is_share = self.halt.endswith("%")
        most = max(1, ceil(jobs * int(self.halt[:-1]) / 100)) if is_share else int(self.halt)
        return replace(self, halt=str(max(1, most - failed)))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: everything that is not part of a job."""

    model: ModelChoice = field(default_factory=ModelChoice)
    sampling: Sampling = field(default_factory=Sampling)
    outside: Outside = field(default_factory=Outside)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: OutputConfig = field(kw_only=False)
    failure: FailurePolicy = field(default_factory=FailurePolicy)
    candidates: CandidatesConfig = field(default_factory=CandidatesConfig)
