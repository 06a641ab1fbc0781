"""Settings outside the manifest: each is declared here, once, as plain data.

Flags, environment variables, recipes, fields of a manifest line, `RunConfig`, the settings' part of
the resume key and `hyimg schema` are derived from these rows. A new setting is a new row.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal

from hyimg_cli.settings.file_names import NameTemplate
from hyimg_cli.settings.kinds import (
    MAX_SEED,
    DeviceName,
    Folder,
    Integer,
    Kind,
    LoraText,
    Names,
    Number,
    NumberPair,
    OneOf,
    Region,
    RunPlace,
    SizeText,
    StepCacheText,
    Switch,
    Text,
    Truth,
)
from hyimg_cli.spec.job import (
    BOT_TASKS,
    BY_ID,
    FITS,
    FORMATS,
    MAX_SOURCE_IMAGES,
    ON_GLOBAL,
    REGION_MODES,
    SizeRequest,
)
from hyimg_cli.spec.run import (
    ATTENTION_BACKENDS,
    DECODE_TILES,
    DTYPES,
    FRAMES,
    GRAPHS,
    OFFLOADS,
    QUANTIZATIONS,
    SDPA_BACKENDS,
    VAE_DTYPES,
)

JobKind = Literal["pictures", "videos"]
# The default of what the job's checkpoint says where nobody else does.
CHECKPOINT = object()
PREFIX = "HYIMG_"
# Panels of the help.
RUN, MODEL, SAMPLING, VIDEO = "Run", "Model", "Sampling defaults", "Video (t2v, i2v)"
OUTSIDE = "Edits that keep their source outside"
SYSTEM_PROMPTS = (
    "None",
    "en_vanilla",
    "en_recaption",
    "en_think_recaption",
    "en_unified",
    "dynamic",
    "custom",
)
VARY = ("picture", "text", "both")
RENORMS = ("global", "channel", "text_channel", "none")
# About seven minutes at 24 a second: beyond any model, so a slip of the pen.
MAX_FRAMES = 10001
MAX_FPS = 240
MAX_RANKS = 64
MAX_CLIPS = 64


@dataclass(frozen=True)
class InKey:
    """How a setting that changes pixels stands in the resume key: under `name`, in a video's under
    `of_videos` if that is another, by the word for its value. A value without a word is not
    written: keys of runs before the setting was there stay.
    """

    name: str
    words: Mapping[Any, str]
    of_videos: str = ""


@dataclass(frozen=True)
class Declaration:
    """One setting.

    `table`: of a recipe, and part of `RunConfig`, where it fills the field `fills`, or that of its
    own name. `panel`: of the help; without one there is no flag. `is_basic`: on the first screen of
    a run's help. `flags`: as spelled, where they do not follow from the name. `also_variable`: of
    another program, read where its own variable is not set. `only`: the kind of
    job that reads it, where not both do. `in_line`: a manifest line may say it, too; `aliases`: by
    these other names. `pixels`: how they depend on it; what is said by the "job" or the
    "checkpoint" is in the resume key by itself, and None changes none.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    _: KW_ONLY
    table: str = ""
    panel: str = ""
    is_basic: bool = False
    only: JobKind | None = None
    flags: tuple[str, ...] = ()
    also_variable: str = ""
    fills: str = ""
    in_line: bool = False
    aliases: tuple[str, ...] = ()
    pixels: InKey | Literal["job", "checkpoint"] | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def spelled(self) -> tuple[str, ...]:
        """Its flags as Typer takes them: `--on/--off` for a truth."""
        is_truth = isinstance(self.kind, Truth)
        return self.flags or ((f"{self.flag}/--no-{self.flag[2:]}",) if is_truth else (self.flag,))

    @property
    def off_flag(self) -> str:
        """The flag that switches a truth off; empty where there is none."""
        return self.spelled[-1].partition("/")[2]

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


def _words(*values: str) -> dict[str, str]:
    return {value: value for value in values}


_run, _model = partial(Declaration, panel=RUN), partial(Declaration, panel=MODEL)
_run_of_pictures = partial(Declaration, panel=RUN, only="pictures")
_model_of_pictures = partial(Declaration, panel=MODEL, only="pictures")
_sampling = partial(Declaration, panel=SAMPLING)
_text = partial(Declaration, panel=SAMPLING, only="pictures")
_outside = partial(Declaration, panel=OUTSIDE, only="pictures", in_line=True, pixels="job")
_video = partial(Declaration, panel=VIDEO, only="videos")
_MODEL = (
    _model_of_pictures(
        "model",
        Text("model"),
        "tiny-image",
        "Folder or hub id.",
        is_basic=True,
        pixels="checkpoint",
    ),
    _model(
        "video_model",
        Text("model"),
        "tiny-video",
        "The same for videos; tiny-video is embedded.",
        only="videos",
        pixels="checkpoint",
    ),
    _video(
        "video_components",
        Folder(),
        None,
        "Folder with text encoder and VAE for a video model that comes without: a Wan checkpoint.",
        fills="components",
        pixels="checkpoint",
    ),
    _model(
        "allow_model",
        Names(),
        None,
        "Models and LoRAs that a line may name, beside those of --model and --video-model.",
    ),
    _model("revision", Text("revision"), None, "Hub revision.", pixels="checkpoint"),
    _model(
        "dtype",
        OneOf(DTYPES),
        "auto",
        "Precision of weights and sums.",
        pixels=InKey("dtype", _words(*DTYPES[1:])),
    ),
    _model(
        "device",
        DeviceName(),
        "auto",
        "Where models run; balanced: over all GPUs.",
        is_basic=True,
    ),
    _model(
        "vae_use_tiling",
        Truth(),
        None,
        "Decode tile by tile, in bounded memory: other pixels at borders. Default: videos only.",
        # What either kind does by itself has no word: see `journal.keys`.
        pixels=InKey("vae", {True: "tiled", False: "whole"}),
    ),
    _model_of_pictures(
        "vae_dtype",
        OneOf(VAE_DTYPES),
        "auto",
        "How pictures' VAEs compute: auto decodes in float16 on a GPU, as the official code does.",
        pixels=InKey("vae_dtype", _words(*VAE_DTYPES[1:])),
    ),
    Declaration(
        "vae_channels_last",
        Truth(),
        False,
        "Convolutions of pictures' VAEs in the other order in memory. They round differently.",
        only="pictures",
        pixels=InKey("vae_layout", {True: "channels last"}),
    ),
    _model(
        "quantization",
        OneOf(QUANTIZATIONS),
        "none",
        "Pictures' experts, videos' transformer in 8 or 4 bits.",
        is_basic=True,
        pixels=InKey("experts", _words(*QUANTIZATIONS[1:]), of_videos="transformer"),
    ),
    _model_of_pictures(
        "offload_experts",
        Truth(),
        False,
        "Experts in main memory, fetched as they are chosen, and the VAE between its turns: for "
        "GPUs that cannot hold them.",
        fills="offloads_experts",
    ),
    _video(
        "cpu_offload",
        OneOf(OFFLOADS),
        "none",
        "model: one network on the GPU at a time, the others in main memory; group: of the "
        "transformer one block. Same pixels.",
    ),
    _video("enable_cpu_offload", Truth(), False, "The same as --cpu-offload model."),
    Declaration(
        "attention_backend",
        OneOf(ATTENTION_BACKENDS),
        "native",
        "The library's kernel of a video transformer's attention.",
        only="videos",
        also_variable="DIFFUSERS_ATTN_BACKEND",
        pixels=InKey("attention", {name: name for name in ATTENTION_BACKENDS if name != "native"}),
    ),
    _video(
        "compile_blocks",
        Truth(),
        False,
        "Compile a transformer's blocks by torch.compile, at each shape's first step.",
        pixels=InKey("blocks", {True: "compiled"}),
    ),
    Declaration(
        "pass_graphs",
        Truth(),
        False,
        "Launch passes of LingBot-World as CUDA graphs, one for each chunk's place. Same pixels.",
        only="videos",
    ),
    Declaration(
        "decode_tiles",
        OneOf(DECODE_TILES),
        "auto",
        "Tiles of a video's decode: the model's own, or half of them each way in less memory.",
        only="videos",
        pixels=InKey("decode", _words(*DECODE_TILES[1:])),
    ),
    Declaration(
        "decode_graphs",
        Switch(GRAPHS),
        "auto",
        "Decode text by CUDA graphs, by default where they can be. They round differently.",
        only="pictures",
        pixels=InKey("text", {"on": "graphs"}),
    ),
    Declaration(
        "batched_decode",
        Truth(),
        False,
        "Attention of a decode step over all its texts at once where no CUDA graph does it.",
        only="pictures",
        pixels=InKey("decode_attention", {True: "batched"}),
    ),
    Declaration(
        "kv_by_slot",
        Truth(),
        False,
        "Keys and values slot by slot: cuDNN then makes one plan, not one for each length.",
        only="pictures",
        pixels=InKey("kv_layout", {True: "slots"}),
    ),
    Declaration(
        "sdpa_backend",
        OneOf(SDPA_BACKENDS),
        "auto",
        "The kernel of a picture's attention; auto: torch chooses; fa3, fa4: flash-attn's.",
        only="pictures",
        pixels=InKey("attention", _words(*SDPA_BACKENDS[1:])),
    ),
    _model(
        "deterministic",
        Truth(),
        False,
        "Only algorithms that give the same bits again; an operation without one is an error.",
        pixels=InKey("algorithms", {True: "deterministic"}),
    ),
)
_SAMPLING = (
    _sampling(
        "size",
        SizeText(),
        SizeRequest(),
        "Of the result.",
        is_basic=True,
    ),
    _sampling(
        "num_inference_steps",
        Integer(1, 1000),
        CHECKPOINT,
        "Denoise steps.",
        is_basic=True,
        flags=("--num-inference-steps", "--steps"),
        aliases=("steps",),
    ),
    _sampling("guidance_scale", Number(0, 100), CHECKPOINT, "How hard the prompt pulls."),
    _sampling(
        "flow_shift", Number(0, 100, above_low=True), CHECKPOINT, "Shift of the noise schedule."
    ),
    _sampling(
        "step_cache",
        StepCacheText(),
        None,
        "Lossy: between full denoise steps estimate what the model would say: "
        "taylor:interval=3,order=1,first=3,tail=1, or none.",
    ),
    _sampling(
        "seed",
        Integer(0, MAX_SEED),
        None,
        "Seed of jobs without one of their own.",
        is_basic=True,
    ),
    _sampling(
        "n",
        Integer(1, 1000),
        1,
        "Number of results of a line.",
        aliases=("num_outputs_per_prompt",),
    ),
    _text("vary", OneOf(VARY), "both", "What the results of a line differ in, by their seeds."),
    _text(
        "bot_task",
        OneOf(BOT_TASKS, (("auto", "none"), ("image", "none"))),
        CHECKPOINT,
        "Text before the picture.",
        is_basic=True,
    ),
    _text(
        "drop_think",
        Truth(),
        CHECKPOINT,
        "Denoise without the think text.",
        flags=("--drop-think/--keep-think",),
    ),
    _text("use_system_prompt", OneOf(SYSTEM_PROMPTS), CHECKPOINT, "Which system prompt."),
    _text("system_prompt", Text("system prompt"), None, "Text for the custom one."),
    _text("ar_seed", Integer(0, MAX_SEED), None, "Seed of the text stage."),
    _text("temperature", Number(0, 100), CHECKPOINT, "Text stage; 0 is greedy."),
    _text("top_k", Integer(0, 2**31 - 1), CHECKPOINT, "Text stage; 0 is off."),
    _text("top_p", Number(0, 1, above_low=True), CHECKPOINT, "Text stage; 1 is off."),
    _text("max_new_tokens", Integer(1, 65536), CHECKPOINT, "Longest text to write."),
    _text(
        "image_guidance_scale",
        Number(0, 100),
        CHECKPOINT,
        "How hard source images pull; BAGEL. Up to 1: not apart from the prompt.",
    ),
    _text(
        "guidance_interval",
        NumberPair(0, 1),
        CHECKPOINT,
        "Noise levels that are guided, the lower one left out: 0.4,1; BAGEL.",
    ),
    _text(
        "guidance_renorm",
        OneOf(RENORMS),
        CHECKPOINT,
        "How guidance is kept from growing; BAGEL.",
    ),
    _text(
        "guidance_renorm_min",
        Number(0, 1),
        CHECKPOINT,
        "How much of its length guidance keeps at least; 1 is renorm none; BAGEL.",
    ),
    _text("infer_align_image_size", Truth(), False, "Edits get their source's aspect ratio."),
    _video(
        "negative_prompt",
        Text("negative prompt", may_be_empty=True),
        "",
        "What the video should not show.",
    ),
    _video("num_frames", Integer(1, MAX_FRAMES), CHECKPOINT, "Frames of a video, 4 k + 1."),
    _video("fps", Integer(1, MAX_FPS), CHECKPOINT, "Frames a second in the file."),
    _video(
        "fit",
        OneOf(FITS),
        None,
        "How an i2v picture gets the video's shape. Default: as the model's authors do it.",
    ),
    _video(
        "lora",
        LoraText(),
        None,
        "LoRA files: FILE[@WEIGHT], for two transformers high=FILE;low=FILE. Needs peft.",
    ),
    _video(
        "scheduler",
        OneOf(("euler",)),
        None,
        "euler: the steps that four- and eight-step models were distilled to. Default: the "
        "checkpoint's own.",
    ),
    _video(
        "guidance_scale_2",
        Number(0, 100),
        CHECKPOINT,
        "Guidance of the second of two transformers.",
        panel="",
    ),
)
_OUTSIDE = (
    _outside(
        "keep_outside",
        Truth(),
        False,
        "Edits in their source's size, every pixel outside the edit equal to it.",
    ),
    _outside("kept_source", Integer(1, MAX_SOURCE_IMAGES), 1, "Of several sources the one kept."),
    _outside("region", Region(), None, "Where an edit may be, in the source's pixels."),
    _outside(
        "region_mode", OneOf(REGION_MODES), "limit", "The region limits what is found, or stands."
    ),
    _outside("on_global", OneOf(ON_GLOBAL), "keep", "What becomes of an edit of all the picture."),
    _outside(
        "max_outside_change",
        Number(0, 100),
        None,
        "Gate: mean distance (CIE76) of the redraw outside the edit.",
    ),
    _outside("max_edited_area", Number(0, 1), None, "Gate: part of the picture that was edited."),
    _outside("max_spill", Number(0, 1), None, "Gate: part of the edit outside the region."),
)
_REUSE = (
    _run_of_pictures(
        "kv_reuse",
        Truth(),
        True,
        "Denoise from the keys and values of the text stage, or compute them again.",
        pixels=InKey("kv_reuse", {True: "reuse", False: "recompute"}),
    ),
    _run_of_pictures(
        "require_kv_reuse",
        Truth(),
        False,
        "Fail a job whose reuse is not complete.",
        flags=("--require-kv-reuse/--allow-recompute",),
        fills="required",
    ),
    _video(
        "prompt_cache",
        Truth(),
        True,
        "Embed each distinct prompt once, before all jobs, or for each job.",
    ),
)
_BATCH = (
    _run_of_pictures(
        "batching_max_size",
        Integer(1, 1024),
        16,
        "Jobs that think, and jobs that draw, together at most.",
        fills="max_size",
    ),
    _run_of_pictures(
        "batch_invariant",
        Truth(),
        True,
        "Keep a job's pixels equal to the bit in any batch (CPU).",
        fills="is_invariant",
        pixels=InKey("batch", {False: "variant"}),
    ),
    _run_of_pictures(
        "prefix_cache_mb", Integer(0, 10**7), 4096, "K/V kept for prefixes that jobs share."
    ),
    _run_of_pictures(
        "prefix_cache_host_mb", Integer(0, 10**7), 0, "More of them, kept in main memory."
    ),
    _video(
        "clips_together",
        Integer(1, MAX_CLIPS),
        1,
        "Clips of LingBot-World that are denoised together. They round differently.",
        fills="clips",
        pixels=InKey("clips", {n: f"{n} together" for n in range(2, MAX_CLIPS + 1)}),
    ),
    _run("prewarm", Truth(), True, "Run each shape once before it counts."),
    Declaration(
        "memory_gb",
        Integer(1, 10**5),
        None,
        "Memory of the machine to plan for, if not this one.",
        only="pictures",
    ),
    _model(
        "gpu_memory_utilization",
        Number(0, 1, above_low=True),
        None,
        "Part of a GPU's memory that the run may use, weights and all.",
    ),
)
_CACHE = (
    _run("cache_dir", Folder(), None, "Folder of the disk cache. Default: ~/.cache/hyimg."),
    _run(
        "disk_cache",
        Truth(),
        True,
        "Keep encoded source images and prompts on disk for later runs.",
    ),
    _run(
        "disk_cache_mb",
        Integer(0, 10**9),
        10240,
        "Most that the disk cache may hold.",
        fills="budget_mb",
    ),
    _run_of_pictures(
        "keep_quantized",
        Truth(),
        False,
        "Keep quantised weights in the disk cache: the next start reads half. It must hold them.",
        fills="keeps_weights",
    ),
)
_PARALLEL = (
    _video(
        "vae_patch_parallel_size",
        Integer(1, MAX_RANKS),
        1,
        "Processes, a GPU each, that share the tiles of a video's decode. Same pixels.",
        fills="vae_ranks",
    ),
    _model(
        "cfg_parallel_size",
        Integer(1, 2),
        1,
        "2: a process (pictures: --tensor-parallel-size of them), a GPU each, for each of the two "
        "guidance branches. Same pixels.",
        fills="cfg_ranks",
    ),
    _video(
        "context_parallel_size",
        Integer(1, MAX_RANKS),
        1,
        "Processes, a GPU each, that share the tokens of Wan's transformer. Equal within rounding.",
        fills="context_ranks",
        pixels=InKey("context", {n: f"{n} ranks" for n in range(2, MAX_RANKS + 1)}),
    ),
    _model_of_pictures(
        "tensor_parallel_size",
        Integer(1, MAX_RANKS),
        1,
        "Processes, a GPU each, that share a picture model's layers. Equal within rounding.",
        flags=("--tensor-parallel-size", "--tp-size"),
        fills="tensor_ranks",
        pixels=InKey("layers", {n: f"{n} ranks" for n in range(2, MAX_RANKS + 1)}),
    ),
    _run(
        "replicas",
        Integer(1, 4096),
        1,
        "Processes with a model each, GPUs of its own each, that share the jobs. Same pixels.",
    ),
    _run(
        "ray_address",
        Text("address"),
        None,
        "Replicas on a Ray cluster: its address, auto, or local for one that is started here.",
    ),
)
_OUTPUT = (
    _run(
        "output_dir",
        RunPlace(),
        None,
        "Folder, or s3://b/run. Default: runs/<manifest>.",
        is_basic=True,
        flags=("-o", "--output-dir"),
    ),
    _run_of_pictures(
        "format",
        OneOf(FORMATS, (("jpg", "jpeg"),)),
        "png",
        "Pictures as PNG, JPEG or WebP.",
        is_basic=True,
        in_line=True,
        aliases=("output_format",),
        pixels="job",
    ),
    _run_of_pictures(
        "quality",
        Integer(1, 100),
        95,
        "Of a JPEG or a lossy WebP.",
        in_line=True,
        aliases=("output_compression",),
        pixels="job",
    ),
    _run_of_pictures(
        "lossless", Truth(), False, "WebP that keeps every pixel.", in_line=True, pixels="job"
    ),
    _run(
        "name",
        NameTemplate(),
        BY_ID,
        "Files by a template: custom_id, stem, folder, index, seed, width, height.",
        is_basic=True,
        in_line=True,
    ),
    _run("metadata", Truth(), True, "Write the job, and that a model made it, into its file."),
    Declaration(
        "keep_gps",
        Truth(),
        False,
        "Keep the place in a kept source's EXIF.",
        panel=OUTSIDE,
        only="pictures",
    ),
    _video("frames", OneOf(FRAMES), "none", "png: write every frame without loss too."),
    _video(
        "checkpoint_every",
        Integer(0, 1000),
        10,
        "Keep a video's latents every K denoise steps, so that a killed job goes on; 0: only those "
        "behind the last step, which are kept in any case until the video is written.",
    ),
    _run("report", Truth(), True, "Keep report.html, a page of all jobs."),
)
_FAILURE = (
    _run(
        "fail_fast",
        Truth(),
        False,
        "Stop at the first failed job, or go on.",
        flags=("--fail-fast/--keep-going",),
    ),
    _run("max_retries", Integer(0, 100), 0, "Tries after a failure that may pass."),
    _run(
        "skip_invalid",
        Truth(),
        False,
        "Run the good lines, record the bad as failed.",
        flags=("--skip-invalid",),
    ),
)
_ROWS = {
    "model": _MODEL,
    "sampling": tuple(replace(row, pixels="job", in_line=True) for row in _SAMPLING),
    "outside": _OUTSIDE,
    "reuse": _REUSE,
    "batch": _BATCH,
    "cache": _CACHE,
    "parallel": _PARALLEL,
    "output": _OUTPUT,
    "failure": _FAILURE,
}
# By table of a recipe, and all by name.
TABLES = {
    name: {row.name: replace(row, table=name) for row in rows} for name, rows in _ROWS.items()
}
SETTINGS = {name: row for rows in TABLES.values() for name, row in rows.items()}
