"""Events of a session at work, and the outcome of each job."""

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

    `reused` came from the AR stage, `shared` from the branch before it. `computed` entered the
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

    `ar_prefill_tokens` of the AR prompt were computed for this job; `ar_shared_tokens` came from
    other jobs. `ar_surplus_tokens` were decoded after the text's end, or before a forced token, and
    discarded. `ar_taken_tokens` were not decoded, because the text had been written already; their
    rows are among the shared rows, or else among the prompt's.
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
    """A rank's part in one decode.

    `area`: latent cells. `busy_s`: decoding, wall time. Bytes: as sent.
    """

    rank: int
    tiles: int
    area: int
    busy_s: float
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class DecodeReport:
    """One decode: a report by rank, and rank 0's work after its own tiles were done.

    `gather_s`: waiting for other ranks' tiles; `merge_s`: blending; `total_s`: the whole decode.
    """

    ranks: tuple[RankReport, ...]
    gather_s: float
    merge_s: float
    total_s: float


@dataclass(frozen=True)
class ParallelReport:
    """How a job was spread over ranks, and its decode; None if rank 0 decoded alone.

    `branch_ranks`: ranks that had a guidance branch of the job. `tensor_ranks`: ranks that had a
    share of the model's layers; `context_ranks`: of a video's tokens.
    """

    branch_ranks: int
    decode: DecodeReport | None
    tensor_ranks: int = 1
    context_ranks: int = 1


@dataclass(frozen=True)
class StepCacheReport:
    """A lossy step cache at work: its rule, and the full and the estimated denoise steps.

    As the loop counted them.
    """

    kind: str
    interval: int
    order: int
    first: int
    tail: int
    full: int
    estimated: int


@dataclass(frozen=True)
class TextConfidence:
    """How probable a model found the text that it wrote: natural logarithms, summed.

    At temperature 1 and before top-k, top-p and penalties, over the `tokens` that it chose freely.
    `recaption`: the same for the part that describes the picture; None without one.
    """

    logprob: float
    tokens: int
    recaption_logprob: float | None = None
    recaption_tokens: int = 0


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
class LayerFile(OutputFile):
    """A written layer of a picture. `layer`: its number, from 1, the lowest."""

    layer: int


@dataclass(frozen=True)
class TextFile:
    """A written answer, in UTF-8. `path` and `sha256` are as for a picture."""

    path: str
    sha256: str


@dataclass(frozen=True)
class VideoFile(OutputFile):
    """A written video.

    `pixel_sha256` is over its frames before compression, in order. `frames_path`: the folder of its
    PNG files, if they were asked for.
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
        """Return the failure of an error, in its own words; an error of another class is a bug."""
        if isinstance(error, HyimgError):
            where = f"{error.where}: " if error.where else ""
            return cls(error.code, where + error.what, error.hint, error.retryable)
        what = f"{type(error).__name__}: {error}"
        return cls("job.internal", what, "this is a bug: please report it", retryable=False)


@dataclass(frozen=True)
class Outcome:
    """One line of `results.jsonl`.

    The page shows a field with a `label` if it differs from its default.

    `replica`: the one of several that did the job, counted from 0. `timings_s` are the job's own
    wall times from when its group could start; a batch's whole time counts in each of its jobs.
    `share_s` is its share of that time: over all jobs, no more than the run took.

    `outputs`: of a picture in layers, what they add up to, then each layer from the lowest.
    `answer` to `record`: of a job that asks for a text. `finish`: how the answer ended. `choices`:
    each one's probability among them; `mass`: what their first tokens have together. `record`: what
    a picture's metadata has, which a text file cannot hold.
    `cot_from`: the job that wrote the text, if it was another one. `written`: how the text came
    about, for a job that ends with its text. `confidence`: what the text's writer had; None for a
    text that was given. `edit`: what a redraw did to the source that it was put back on, and its
    files; `finishing_key`: everything that must be equal for that to be valid.
    `sigmas`: of a schedule that is not the checkpoint's own. `warnings`: what somebody should look
    at; `notes`: how its inputs were read and how it was made, which degrades nothing.
    `candidate_of` to `draft_of`: as in `spec.job.Lineage`. `source_sha256`: of each source's bytes.
    `model_sha256`: fingerprint of the checkpoint.
    """

    custom_id: str
    status: Literal["done", "failed"]
    key: str
    attempt: int = field(default=1, metadata={"label": "attempt"})
    outputs: tuple[VideoFile | LayerFile | OutputFile | TextFile, ...] = ()
    answer: str | None = None
    answer_token_ids: tuple[int, ...] | None = None
    finish: str | None = None
    choices: dict[str, float] | None = None
    mass: float | None = None
    thought: str | None = None
    record: dict[str, Any] | None = None
    denoise_steps: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    cot_from: str | None = None
    written: dict[str, Any] | None = None
    confidence: TextConfidence | None = None
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
    draft_of: str | None = None
    source_sha256: tuple[str, ...] | None = None
    model_sha256: str | None = None
    metadata: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """An event that belongs to no job. `replica`: the one of several that sent it, from 0."""

    replica: int | None = None


@dataclass(frozen=True)
class ModelLoading(Readiness):
    """A model's weights are about to be read, which may take minutes; `nbytes`: as stored."""

    model: str
    nbytes: int = 0


@dataclass(frozen=True)
class ModelLoaded(Readiness):
    """A model is ready: seconds it took, its device, its parameters.

    `beside`: other models stay loaded with it. `ranks`: processes that work with it. `offload`: the
    one that it took by itself to fit, in words.
    """

    model: str
    load_s: float
    device: str
    dtype: str
    parameters: int
    beside: tuple[str, ...] = ()
    ranks: int = 1
    offload: str = ""


@dataclass(frozen=True)
class ModelReleased(Readiness):
    """A model left memory, because the next one and its work need `needed_bytes`.

    `free_bytes` were free while it was loaded.
    """

    model: str
    needed_bytes: int
    free_bytes: int


RemarkKind = Literal["note", "info", "fault"]


@dataclass(frozen=True)
class Remark:
    """A remark about the run rather than a job.

    `kind`: a `note` on what was asked for, an `info` on what was done, or a `fault` that changes no
    job.
    """

    text: str
    kind: RemarkKind = "note"


Embedded = Literal["prompts", "start pictures", "source pictures"]


@dataclass(frozen=True)
class PromptsReady(Readiness):
    """Every distinct prompt, or start picture, of a model's jobs is embedded.

    `encoded` of them were embedded now, in `encode_s`; their encoders have left memory.
    """

    strings: int
    encoded: int
    encode_s: float
    what: Embedded = "prompts"


@dataclass(frozen=True)
class Prewarmed(Readiness):
    """A group's new shapes were run once, outside any job's time.

    `graphs`: decode steps captured as CUDA graphs. `tokens`: the maximum length of their texts, if
    that made shapes.
    """

    shapes: int
    prewarm_s: float
    graphs: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplicaDied(Readiness):
    """A replica ended before its work did, and `why`; its `jobs` are dispatched again.

    `starts_again`: a new process replaces it.
    """

    why: str
    jobs: int
    starts_again: bool


@dataclass(frozen=True)
class GroupStarted:
    """The following jobs share a model and a size class."""

    model: str
    size_class: str


@dataclass(frozen=True)
class JobStarted:
    """A job's work begins."""

    custom_id: str


@dataclass(frozen=True)
class Progress:
    """Progress of a job in a phase: `done` of `total` tokens or denoise steps, 0 if unknown.

    `answer`: of a job that streams, its answer as far as it is written.
    The phase `embed` belongs to no job: it counts the plan's prompts or start pictures.
    """

    custom_id: str
    phase: str
    done: int = 0
    total: int = 0
    answer: str = ""


@dataclass(frozen=True)
class JobEnded:
    """A job succeeded, and its file is on disk, or it failed; its line is in the journal."""

    outcome: Outcome

    @property
    def is_done(self) -> bool:
        return self.outcome.status == "done"


Event = Readiness | GroupStarted | JobStarted | Progress | JobEnded
