"""How a run is carried out: everything that is not part of a job.

Fields are given by name; only what a class is first of all about may be given by position. What
users may set of them is declared in `settings.table`.
"""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, get_args

Frames = Literal["none", "png"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "fp8", "nf4"]
Graphs = Literal["auto", "on", "off"]
VaeDtype = Literal["auto", "float32", "float16"]
SdpaBackend = Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"]
Offloading = Literal["none", "model", "group"]
DecodeTiles = Literal["auto", "own", "half"]
FRAMES: tuple[Frames, ...] = get_args(Frames)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
VAE_DTYPES: tuple[VaeDtype, ...] = get_args(VaeDtype)
GRAPHS: tuple[Graphs, ...] = get_args(Graphs)
SDPA_BACKENDS: tuple[SdpaBackend, ...] = get_args(SdpaBackend)
OFFLOADS: tuple[Offloading, ...] = get_args(Offloading)
DECODE_TILES: tuple[DecodeTiles, ...] = get_args(DecodeTiles)
# By the names of the library's AttentionBackendName.
ATTENTION_BACKENDS = (
    *("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"),
    *("_native_npu", "_native_xla", "flex", "flash", "flash_hub", "flash_varlen"),
    *("flash_varlen_hub", "flash_4_hub", "_flash_3", "_flash_varlen_3", "_flash_3_hub"),
    *("_flash_3_varlen_hub", "aiter_fa2_hub", "sage", "sage_hub", "sage_blackwell_hub"),
    *("sage_varlen", "_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton", "xformers"),
)
# Those of them that can split a video's tokens over ranks.
CONTEXT_BACKENDS = (
    *("native", "_native_cudnn", "_native_flash", "_native_npu", "flash", "flash_hub"),
    *("flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "sage", "sage_hub"),
)


@dataclass(frozen=True)
class Place:
    """What a machine has by which the device, dtype and graphs of "auto" are decided."""

    has_gpu: bool
    has_triton: bool


@dataclass(frozen=True)
class CacheConfig:
    """The disk cache, kept from one run to the next. Without a `folder`, nothing.

    `keeps_weights`: experts' weights are kept there as they were quantised.
    """

    folder: Path | None = None
    _: KW_ONLY
    budget_mb: int = 10240
    keeps_weights: bool = False

    @property
    def budget_bytes(self) -> int:
        return self.budget_mb * 1_000_000


@dataclass(frozen=True)
class ModelChoice:
    """Which weights, where and in which precision.

    `model` is a folder, a hub id or `tiny-image` (embedded). `device` is `auto`, `cpu`, `cuda`,
    `cuda:N`, or `balanced` to spread the layers over every visible GPU. `vae_use_tiling`: latents
    become pixels tile by tile, in bounded memory, or whole; other pixels either way; None: tiles
    for videos, whole pictures. `quantization` holds the routed experts, or a video's transformer,
    in 8 bits (`fp8`) or 4 (`nf4`); other pixels, too. `decode_graphs`: text is decoded by CUDA
    graphs, by default where they can be; they round differently, so other texts are possible.
    `batched_decode`: where there is none, a decode step's attention takes all rows at once, too.
    `kv_by_slot`: a picture's keys and values lie slot by slot, not head by head.
    `sdpa_backend`: of torch's kernels, the one of a picture's attention; `auto`: torch chooses.
    `fa3`, `fa4`: flash-attn's, in the place of torch's own flash for the whole process.
    `deterministic`: torch takes those algorithms alone that give the same bits again.
    `cpu_offload`: of a video model one network at a time is on the GPU, of its transformer one
    block (`group`), the others are in main memory; the same pixels. `attention_backend`,
    `compile_blocks`: of a video's transformer; they round differently. `vae_dtype`, by which
    pictures' VAEs compute, with weights in float32: `float16` decodes under autocast, `auto` so on
    a GPU where upstream does, else in float32 (TF32 on a GPU), `float32` has all its bits.
    `vae_channels_last`: their convolutions' other order in memory. `offloads_experts`: of a
    picture's model the experts are in main memory, `expert_room` bytes of them on the GPU beside
    two layers, and so is the VAE between its turns. `components`: a folder with the text encoder
    and VAE of a video model that comes without. `pass_graphs`: passes of a model that works in
    chunks are CUDA graphs; the same numbers. `decode_tiles`: of a video's decode, whatever
    `vae_use_tiling` says: the model's `own`, or those of half their side; other pixels. `place`:
    the machine that the work is done on; None: this. `weights_cache`: where quantised weights are
    kept for the next start; None: nowhere.
    """

    model: str = "tiny-image"
    _: KW_ONLY
    revision: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    vae_use_tiling: bool | None = None
    quantization: Quantization = "none"
    decode_graphs: Graphs = "auto"
    batched_decode: bool = False
    kv_by_slot: bool = False
    sdpa_backend: SdpaBackend = "auto"
    deterministic: bool = False
    cpu_offload: Offloading = "none"
    attention_backend: str = "native"
    compile_blocks: bool = False
    components: str | None = None
    pass_graphs: bool = False
    decode_tiles: DecodeTiles = "auto"
    vae_dtype: VaeDtype = "auto"
    vae_channels_last: bool = False
    offloads_experts: bool = False
    expert_room: int = 0
    place: Place | None = None
    weights_cache: CacheConfig | None = None

    def kind(self, *, has_gpu: bool) -> Literal["cpu", "cuda"]:
        """Kind of device that is asked for, on a machine with a GPU or without."""
        is_cpu = self.device == "cpu" or (self.device == "auto" and not has_gpu)
        return "cpu" if is_cpu else "cuda"

    @property
    def tiles_videos(self) -> bool:
        """True unless start pictures are encoded whole, and videos decoded so if nothing is said of
        that.
        """
        return self.vae_use_tiling is not False

    @property
    def tiles_decodes(self) -> bool:
        """True unless videos are decoded whole."""
        return self.tiles_videos or self.decode_tiles != "auto"

    def dtype_on(self, kind: str) -> str:
        """Dtype on a kind of device: float32 on the CPU, bfloat16 on a GPU by default."""
        by_default = "float32" if kind == "cpu" else "bfloat16"
        return by_default if self.dtype == "auto" else self.dtype

    def wants_graphs(self, *, on_one_gpu: bool, has_triton: bool) -> bool:
        """True if text is decoded by CUDA graphs, in one process. Decided here alone: resume keys
        say it before anything is loaded.
        """
        if self.decode_graphs == "auto":
            return on_one_gpu and has_triton and not self.offloads_experts
        return self.decode_graphs == "on"


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """`kv_reuse`: the diffusion stage starts from the AR stage's K/V. `required`: or the job
    fails. `prompt_cache`: a video prompt is embedded once, not for each job.
    """

    kv_reuse: bool = True
    required: bool = False
    prompt_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes, and what jobs work with together.

    `max_size`: jobs that think together, and that draw together, at most; fewer where memory is
    short. `memory_gb`: of the device's memory, weights and all may fill so much; None: what is
    free. `gpu_memory_utilization`: the part of each GPU's memory, above 0 to 1, that the run may
    use, weights and all; where both are given, the smaller counts. `is_invariant`: a job's pixels
    do not depend on its batch, to the bit (CPU). `prefix_cache_mb`: K/V of shared prefixes kept
    between jobs, on the device; `prefix_cache_host_mb`: more of them in main memory. 0: none.
    `clips`: of a video model that works in chunks, so many are denoised together; other pixels, by
    rounding. `prewarm`: each shape is run once before it counts. `prefetches_sources`: the next
    jobs' source images are encoded beside the model; None: where that suits the device, and its
    memory is not short of experts.
    """

    max_size: int = 16
    is_invariant: bool = True
    prefix_cache_mb: int = 4096
    prefix_cache_host_mb: int = 0
    prewarm: bool = True
    prefetches_sources: bool | None = None
    clips: int = 1
    memory_gb: int | None = None
    gpu_memory_utilization: float | None = None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else self.memory_gb * 1_000_000_000


@dataclass(frozen=True)
class OutputConfig:
    """Where results go and what they carry.

    `frames`: beside a video, its frames without loss. `checkpoint_every`: denoise steps after which
    a video's latents are kept until it is done; 0: only behind the last. `only_texts`: a job ends
    with its text, and nothing is drawn. `keep_gps`: a kept source's EXIF keeps its place.
    """

    folder: Path
    _: KW_ONLY
    metadata: bool = True
    frames: Frames = "none"
    checkpoint_every: int = 10
    only_texts: bool = False
    keep_gps: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over how many processes the work is spread.

    `cfg_ranks`: guidance branches, of which there are at most two. Of a video: `vae_ranks`, the
    tiles of its decode. Neither changes pixels. `context_ranks`: the tokens of a video's branches,
    `tensor_ranks`: the layers of a picture's model, for each branch; sums round differently then.
    `replicas`: sessions with a model of their own each, on a GPU of their own, that share the jobs;
    no pixel changes. `ray_address`: of the Ray cluster that they run on, `local` for one that is
    started here; None: processes of this machine.
    """

    vae_ranks: int = 1
    cfg_ranks: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1
    replicas: int = 1
    ray_address: str | None = None

    @property
    def ranks(self) -> int:
        """Processes that are needed for a video, this one counted."""
        return max(self.vae_ranks, self.step_ranks)

    @property
    def step_ranks(self) -> int:
        """Those of them that hold the transformer."""
        return max(self.cfg_ranks, self.context_ranks)

    @property
    def picture_ranks(self) -> int:
        """Processes that are needed for a picture, this one counted."""
        return self.tensor_ranks * self.cfg_ranks

    @property
    def has_replicas(self) -> bool:
        """True if sessions run in other processes than this."""
        return self.replicas > 1 or self.ray_address is not None

    @property
    def of_session(self) -> int:
        """Processes, a GPU each, that one session needs for whatever it makes."""
        return max(self.ranks, self.picture_ranks)


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Policy for failed jobs."""

    fail_fast: bool = False
    max_retries: int = 0


@dataclass(frozen=True)
class RunConfig:
    """One run: everything that is not part of a job."""

    output: OutputConfig
    _: KW_ONLY
    model: ModelChoice = field(default_factory=ModelChoice)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    failure: FailurePolicy = field(default_factory=FailurePolicy)
