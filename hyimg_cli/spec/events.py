"""What a session tells its readers while it works, and what became of each job."""

from dataclasses import dataclass, field
from typing import Any, Literal

PHASES = (
    "queue",
    "read",
    "encode",
    "prefill",
    "think",
    "kv_handoff",
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
    transformer, counted there. The three add up to the prefix.
    """

    reused: int
    shared: int
    computed: int
    per_step: int


@dataclass(frozen=True)
class ReuseReport:
    """What the diffusion stage took over from the AR stage, and why not more.

    `ar_prefill_tokens` of the AR prompt were computed for this job, `ar_shared_tokens` were there
    from other jobs. `ar_surplus_tokens` were decoded behind the text's end, or before a forced
    token, and thrown away.
    """

    status: ReuseStatus
    ar_prefill_tokens: int
    ar_shared_tokens: int
    ar_decode_tokens: int
    branches: tuple[BranchTokens, ...]
    reason: str = ""
    ar_surplus_tokens: int = 0


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
class Failure:
    """Why a job failed, in the words of its error."""

    code: str
    message: str
    hint: str
    retryable: bool


@dataclass(frozen=True)
class Outcome:
    """One line of `results.jsonl`."""

    custom_id: str
    status: Literal["done", "failed"]
    key: str
    attempt: int = 1
    outputs: tuple[OutputFile, ...] = ()
    denoise_steps: int = 0
    cot_text: str | None = None
    cot_token_ids: tuple[int, ...] | None = None
    think_truncated: bool = False
    ratio_index: int | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    overlapped_s: dict[str, float] = field(default_factory=dict)
    kv_reuse: ReuseReport | None = None
    cache: dict[str, dict[str, int]] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    peak_memory_mb: float | None = None
    warnings: tuple[str, ...] = ()
    error: Failure | None = None
    metadata: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelLoaded:
    """A model is ready: seconds it took, where it lives, its parameters."""

    model: str
    load_s: float
    device: str
    dtype: str
    parameters: int


@dataclass(frozen=True)
class Prewarmed:
    """A group's new shapes were run once, beside any job's time."""

    shapes: int
    prewarm_s: float


@dataclass(frozen=True)
class GroupStarted:
    """The jobs that follow share a model and a size class."""

    model: str
    size_class: str
    job_count: int


@dataclass(frozen=True)
class JobStarted:
    """A job's work begins."""

    custom_id: str


@dataclass(frozen=True)
class PhaseStarted:
    """A job entered a phase; `total` counts its units of work where that is known, else 0."""

    custom_id: str
    phase: str
    total: int = 0


@dataclass(frozen=True)
class ThinkToken:
    """The AR stage wrote its `count`-th token."""

    custom_id: str
    count: int


@dataclass(frozen=True)
class DenoiseStep:
    """A denoise step is done; `step` counts from 1 to `total`."""

    custom_id: str
    step: int
    total: int


@dataclass(frozen=True)
class JobDone:
    """The picture is on disk and the line is in the journal."""

    outcome: Outcome


@dataclass(frozen=True)
class JobFailed:
    """The job failed and its line is in the journal; the run goes on."""

    outcome: Outcome


Event = (
    ModelLoaded
    | Prewarmed
    | GroupStarted
    | JobStarted
    | PhaseStarted
    | ThinkToken
    | DenoiseStep
    | JobDone
    | JobFailed
)
