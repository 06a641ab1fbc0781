"""How much of a run is left, in seconds: by what it has done so far, and by what earlier runs took.

    loading ─ ready (load, prompts, prewarm) ─▶ text (a job each) ─▶ denoise (cells each) ─▶ finish

Time between two events counts for the stage of the later one. A stage that has work left and that
neither this run nor an earlier one has ever done makes the answer unknown.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hyimg_cli.engine.timing.observed import RunTiming
from hyimg_cli.models import registry
from hyimg_cli.spec.events import (
    DenoiseStep,
    Event,
    GroupStarted,
    JobDone,
    JobFailed,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    PhaseStarted,
    Prewarmed,
    PromptsReady,
    ThinkToken,
)
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.step_cache import count_full

_STAGES = {
    "ready": ("load", "embed", "prewarm"),
    "text": ("encode", "prefill", "think"),
    "denoise": ("denoise",),
    "finish": ("decode", "rest"),
}
# Earlier runs count as much as this part of the work done in this one.
_EARLIER = 0.1
# A text that has grown beyond its kind's mean is not at its end yet.
_ALMOST = 0.95
# Seconds that a run may be late before nobody says when it ends.
_PATIENCE_S = 10.0
_READY = ModelLoading | ModelLoaded | PromptsReady | Prewarmed | GroupStarted


@dataclass
class _Stage:
    """A stage of one model's jobs: units of work in all and done, seconds that these took."""

    units: float = 0.0
    done: float = 0.0
    seconds: float = 0.0
    earlier: float | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds for the units that are left; None where nothing tells what one takes."""
        left = max(0.0, self.units - self.done)
        if left <= 1e-9 * self.units:
            return 0.0
        weight = _EARLIER * self.units if self.earlier is not None else 0.0
        if self.done + weight <= 0:
            return None
        seconds = self.seconds + weight * (self.earlier or 0.0)
        return left * seconds / (self.done + weight)


@dataclass
class _Ready(_Stage):
    """What comes before a model's jobs: of it nothing is seen but its end."""

    units: float = 1.0

    @property
    def left_s(self) -> float | None:
        if self.done:
            return 0.0
        return None if self.earlier is None else max(0.0, self.earlier - self.seconds)


@dataclass(slots=True)
class _Progress:
    """How much of a job is done: parts of its text and of its steps, from 0 to 1."""

    model: str
    cells: float
    text: float = 0.0
    steps: float = 0.0


@dataclass
class _Texts:
    """Mean length of the texts of a model."""

    count: int = 0
    tokens: float = 0.0
    last: dict[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        return self.tokens / self.count if self.count else None


class TimeLeft:
    """Follows a run's events; knows what it has done, and says what is left."""

    def __init__(
        self,
        plan: Plan,
        *,
        earlier: Mapping[str, Sequence[RunTiming]] | None = None,
        replicas: int = 1,
        revision: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`earlier`: by model, what runs like this have taken."""
        self._clock = clock
        self._began = self._last = clock()
        self._first_job: float | None = None
        self.total, self.done = len(plan.jobs), 0
        self._plan, self._revision = plan, revision
        # Jobs at work; those that are over.
        self._jobs: dict[str, _Progress] = {}
        self._over: set[str] = set()
        self._texts = {group.model: _Texts() for group in plan.groups}
        self._stages = {
            (model, name): _Ready() if name == "ready" else _Stage()
            for model in self._texts
            for name in _STAGES
        }
        for group in plan.groups:
            for name in ("text", "finish"):
                self._stages[group.model, name].units += len(group.jobs)
            for job in group.jobs:
                self._stages[group.model, "denoise"].units += cells(job, revision)
        for model in self._texts:
            self._learn(model, (earlier or {}).get(model, ()), replicas)
        self._at = next(iter(self._texts), "")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def seconds_per_job(self) -> float | None:
        """Since the first job began, by jobs that are done."""
        if self._first_job is None or not self.done:
            return None
        return (self._last - self._first_job) / self.done

    @property
    def left_s(self) -> float | None:
        """Seconds until the last job is done; None while nobody can know."""
        total = 0.0
        for stage in self._stages.values():
            left_s = stage.left_s
            if left_s is None:
                return None
            total += left_s
        waited = self._clock() - self._last
        if waited > total + _PATIENCE_S:
            return None  # what is awaited takes longer than all of it should
        # Between two events it counts down, but never to nothing: something is still awaited.
        return max(total - waited, 0.1 * total)

    def add(self, event: Event) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        name = self._stage_of(event)
        if name:
            stage = self._stages.get((self._at, name))
            if stage is not None:
                stage.seconds += passed
        match event:
            case ModelLoading():
                self._at = event.model
            case GroupStarted():
                self._at = event.model
                self._stages.get((event.model, "ready"), _Ready()).done = 1.0
            case JobStarted():
                self._first_job = now if self._first_job is None else self._first_job
                self._set(event.custom_id, text=0.0, steps=0.0)
            case ThinkToken():
                self._written(event)
            case PhaseStarted():
                if event.phase.startswith("denoise"):
                    self._text_ended(event.custom_id)
            case DenoiseStep():
                self._set(event.custom_id, text=1.0, steps=event.step / max(1, event.total))
            case JobDone() | JobFailed():
                self._end(event.outcome.custom_id)
            case _:
                pass

    def _stage_of(self, event: Event) -> str:
        if isinstance(event, _READY):
            return "ready"
        if isinstance(event, ThinkToken | PhaseStarted):
            return "text"
        if isinstance(event, DenoiseStep):
            return "denoise"
        return "finish" if isinstance(event, JobDone | JobFailed | JobStarted) else ""

    def _at_work(self, custom_id: str) -> _Progress | None:
        """How far a job is; None for one that is over, or of no plan."""
        is_new = custom_id not in self._jobs and custom_id not in self._over
        if is_new and (job := self._plan.by_id.get(custom_id)):
            self._jobs[custom_id] = _Progress(job.model, cells(job, self._revision))
        return self._jobs.get(custom_id)

    def _learn(self, model: str, runs: Sequence[RunTiming], replicas: int) -> None:
        """What a unit of each stage took in earlier runs."""
        groups = [group for run in runs for group in run.groups]
        ready = [
            sum(run.phases[name].seconds for name in _STAGES["ready"] if name in run.phases)
            for run in runs
        ]
        if not groups:
            return
        self._stages[model, "ready"].earlier = statistics.median(ready)
        jobs = sum(group.jobs for group in groups)
        for name in ("text", "denoise", "finish"):
            samples = [
                group.phases[part]
                for group in groups
                for part in _STAGES[name]
                if part in group.phases
            ]
            units = sum(one.units for one in samples) if name == "denoise" else jobs
            seconds = sum(one.seconds for one in samples)
            self._stages[model, name].earlier = seconds / units / replicas if units else None
        lengths = [one for group in groups for one in group.texts.values()]
        texts = self._texts[model]
        texts.count = sum(one.texts for one in lengths)
        texts.tokens = sum(one.mean * one.texts for one in lengths)

    def _written(self, event: ThinkToken) -> None:
        job = self._at_work(event.custom_id)
        if job is None:
            return
        texts = self._texts[job.model]
        texts.last[event.custom_id] = event.count
        if texts.mean:
            self._set(event.custom_id, text=min(_ALMOST, event.count / texts.mean))

    def _text_ended(self, custom_id: str) -> None:
        job = self._at_work(custom_id)
        if job is not None:
            texts = self._texts[job.model]
            texts.tokens += (length := texts.last.pop(custom_id, 0))
            texts.count += length > 0
            self._set(custom_id, text=1.0)

    def _end(self, custom_id: str) -> None:
        self.done += 1
        job = self._at_work(custom_id)
        if job is not None:
            self._set(custom_id, text=1.0, steps=1.0)
            self._stages[job.model, "finish"].done += 1
            self._over.add(custom_id)
            del self._jobs[custom_id]

    def _set(self, custom_id: str, *, text: float, steps: float | None = None) -> None:
        job = self._at_work(custom_id)
        if job is None:
            return
        self._stages[job.model, "text"].done += text - job.text
        job.text = text
        if steps is not None:
            self._stages[job.model, "denoise"].done += (steps - job.steps) * job.cells
            job.steps = steps


def cells(job: Job, revision: str | None) -> float:
    """Latent cells that a job's denoise steps move, all branches counted."""
    if isinstance(job, ImageJob):
        card = registry.model_card(job.model, revision)
        bucket = card.bucket_of(job.size)
        side = card.base_size // card.pixels_per_cell
        grid = (side, side) if bucket is None else card.latent_grid(bucket.size)
        branches = 2 if job.guidance_scale > 1 else 1
        steps = count_full(job.step_cache, card.steps_of(job.num_inference_steps))
        return float(math.prod(grid) * branches * steps)
    film = registry.video_card(job.model, revision)
    cells_a_step = math.prod(film.latent_grid(job.size, job.num_frames)) * job.branch_count
    return float(cells_a_step * film.evaluated(job))
