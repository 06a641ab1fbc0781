"""Events of a session while it works, and the outcome of each job."""

from dataclasses import dataclass, field
from typing import Any, Literal

from hyimg_cli.errors import HyimgError

PHASES = (
    "queue",
    "read",
    "encode",
    "prefill",
    "think",
    "kv_handoff",
    "compile",
    "denoise_first",
    "denoise_rest",
    "decode_latents",
    "write",
)
ReuseStatus = Literal["hit", "partial", "recompute", "none"]


@dataclass(frozen=True)
class BranchTokens:
    """Token rows of one guidance branch's prefix, and of each denoise step.

    `reused` came from the AR stage, `shared` from the branch before it; `computed` entered the
    transformer, counted there, or were given to the branch's own ranks. The three add up to the
    prefix.
    """

    reused: int
    shared: int
    computed: int
    per_step: int


@dataclass(frozen=True)
class ReuseReport:
    """K/V that the diffusion stage took over from the AR stage, and why not more.

    `ar_prefill_tokens` of the AR prompt were computed for this job, `ar_shared_tokens` were there
    from other jobs. `ar_surplus_tokens` were decoded behind the text's end, or before a forced
    token, and thrown away. `ar_taken_tokens` were not decoded: the text was written already, and
    its rows are among the shared ones, or else among those of the prompt.
    """

    status: ReuseStatus
    ar_prefill_tokens: int
    ar_shared_tokens: int
    ar_decode_tokens: int
    branches: tuple[BranchTokens, ...]
    reason: str = ""
    ar_surplus_tokens: int = 0
    ar_taken_tokens: int = 0


@dataclass(frozen=True)
class RankReport:
    """A rank's part in one decode. `area`: latent cells; `busy_s`: decoding, wall time; bytes: as
    they travelled.
    """

    rank: int
    tiles: int
    area: int
    busy_s: float
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class DecodeReport:
    """One decode: a report by rank, and what rank 0 did when its own tiles were done.

    `gather_s`: waiting for tiles of others; `merge_s`: blending; `total_s`: the whole decode.
    """

    ranks: tuple[RankReport, ...]
    gather_s: float
    merge_s: float
    total_s: float


@dataclass(frozen=True)
class ParallelReport:
    """How a job was spread over ranks: how many had a guidance branch of it, and its decode; None
    where rank 0 decoded alone. `tensor_ranks`: how many had a share of the model's layers;
    `context_ranks`, of a video's tokens.
    """

    branch_ranks: int
    decode: DecodeReport | None
    tensor_ranks: int = 1
    context_ranks: int = 1


@dataclass(frozen=True)
class StepCacheReport:
    """A lossy step cache at work: its numbers, and how many denoise steps evaluated the model and
    how many were estimated, as the loop counted them.
    """

    kind: str
    interval: int
    order: int
    first: int
    tail: int
    full: int
    estimated: int


@dataclass(frozen=True)
class OutputFile:
    """A written picture. `path` is relative to the output folder; digests are hex sha256."""

    path: str
    sha256: str
    pixel_sha256: str
    width: int
    height: int
    seed: int


@dataclass(frozen=True)
class VideoFile(OutputFile):
    """A written video. `pixel_sha256` is over its frames before compression, in order;
    `frames_path` the folder of its PNG files, where they were asked for.
    """

    num_frames: int
    fps: int
    frames_path: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why a job failed, in the words of its error."""

    code: str
    message: str
    hint: str
    retryable: bool

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """In the error's own words, with where it was; one that is not ours is a bug."""
        if isinstance(error, HyimgError):
            where = f"{error.where}: " if error.where else ""
            return cls(error.code, where + error.what, error.hint, error.retryable)
        what = f"{type(error).__name__}: {error}"
        return cls("job.internal", what, "this is a bug: please report it", retryable=False)


@dataclass(frozen=True)
class Outcome:
    """One line of `results.jsonl`; the page shows a field with a `label` where it is off its
    default. `replica`: the one of several that did it, counted from 0.

    `timings_s` are the job's own wall time from when its group could start, a batch's whole time in
    each of its jobs. `share_s` is its part of that time: over all jobs no more than the run took.

    `cot_from`: the job that wrote the text, where that was another one. `written`: how the text of
    a job that ends with it came about. `edit`: what a redraw did to the source that it was put
    back on, and its files; `finishing_key` what must be equal for that to count. `sigmas`: of a
    schedule that is not the checkpoint's own. `warnings`: what was degraded; `notes`: how its
    inputs were read, which degrades nothing. `candidate_of` to `draft_of`: as `spec.job.Lineage`;
    `source_sha256`: of each source's bytes; `model_sha256`: fingerprint of the checkpoint.
    """

    custom_id: str
    status: Literal["done", "failed"]
    key: str
    attempt: int = field(default=1, metadata={"label": "attempt"})
    outputs: tuple[OutputFile, ...] = ()
    denoise_steps: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    cot_from: str | None = None
    written: dict[str, Any] | None = None
    sigmas: tuple[float, ...] | None = None
    step_cache: StepCacheReport | None = None
    think_truncated: bool = False
    ratio_index: int | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    share_s: dict[str, float] = field(default_factory=dict)
    overlapped_s: dict[str, float] = field(default_factory=dict)
    kv_reuse: ReuseReport | None = None
    cache: dict[str, dict[str, int]] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    parallel: ParallelReport | None = None
    peak_memory_mb: float | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), metadata={"label": "note"})
    error: Failure | None = None
    replica: int | None = None
    edit: dict[str, Any] | None = None
    finishing_key: str = ""
    candidate_of: str | None = None
    candidate: int | None = None
    round: int | None = None
    draft_of: str | None = None
    source_sha256: tuple[str, ...] | None = None
    model_sha256: str | None = None
    metadata: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What a session tells beside its jobs. `replica`: the one of several that tells it, counted
    from 0.
    """

    replica: int | None = None


@dataclass(frozen=True)
class ModelLoading(Readiness):
    """A model's weights are about to be read, `nbytes` as they are stored; it may take minutes."""

    model: str
    nbytes: int = 0


@dataclass(frozen=True)
class ModelLoaded(Readiness):
    """A model is ready: seconds it took, where it lives, its parameters; `beside` it others stay
    loaded. `ranks`: processes that work with it.
    """

    model: str
    load_s: float
    device: str
    dtype: str
    parameters: int
    beside: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class ModelReleased(Readiness):
    """A model left memory, for the next one and its work need `needed_bytes` and `free_bytes` were
    left beside it.
    """

    model: str
    needed_bytes: int
    free_bytes: int


RemarkKind = Literal["note", "info", "fault"]


@dataclass(frozen=True)
class Remark:
    """What the reader should know beside the jobs. `kind`: a `note` on what was asked for, an
    `info` on what was done, or a `fault` that changes no job.
    """

    text: str
    kind: RemarkKind = "note"


Embedded = Literal["prompts", "start pictures", "source pictures"]


@dataclass(frozen=True)
class PromptsReady(Readiness):
    """Every distinct prompt, or start picture, of a model's jobs is embedded: `encoded` of them
    now, `encode_s` long; their encoders have left memory.
    """

    strings: int
    encoded: int
    encode_s: float
    what: Embedded = "prompts"


@dataclass(frozen=True)
class Prewarmed(Readiness):
    """A group's new shapes were run once, beside any job's time; `graphs`: decode steps that were
    captured as CUDA graphs; `tokens`: up to how many their texts have, where that made shapes.
    """

    shapes: int
    prewarm_s: float
    graphs: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplicaDied(Readiness):
    """A replica ended before its work did, and `why`; `jobs` of its own are dispatched again.

    `starts_again`: a new process takes its place.
    """

    why: str
    jobs: int
    starts_again: bool


@dataclass(frozen=True)
class GroupStarted:
    """The jobs that follow share a model and a size class."""

    model: str
    size_class: str


@dataclass(frozen=True)
class JobStarted:
    """A job's work begins."""

    custom_id: str


@dataclass(frozen=True)
class Progress:
    """How far a job is in a phase: `done` of `total` tokens or denoise steps, 0 where that is not
    known. In the phase `embed`, which is of no job: prompts or start pictures of the plan.
    """

    custom_id: str
    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class JobEnded:
    """A job is done, its file on disk, or it failed; its line is in the journal."""

    outcome: Outcome

    @property
    def is_done(self) -> bool:
        return self.outcome.status == "done"


Event = Readiness | GroupStarted | JobStarted | Progress | JobEnded
