"""A run's events as timings to keep: what each model's groups have taken. No torch."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hyimg_cli.engine.timing.machine import Processors, threads
from hyimg_cli.engine.timing.observed import GroupTiming, RunTiming, Sample, TextLengths, summed
from hyimg_cli.manifest.texts import size_class_of
from hyimg_cli.models import registry
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobDone,
    JobFailed,
    ModelLoaded,
    ModelLoading,
    Outcome,
    Prewarmed,
    PromptsReady,
    VideoFile,
)
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.plan import Plan, size_class_of_video
from hyimg_cli.spec.run import RunConfig

# Phases of a job that later plans tell apart, by those of its result line.
_PARTS = {
    "encode": ("read", "encode"),
    "prefill": ("prefill", "kv_handoff"),
    "think": ("think",),
    "denoise": ("denoise_first", "denoise_rest"),
    "decode": ("decode_latents",),
}


@dataclass
class _Seen:
    """A group as it went: jobs of several replicas come in one."""

    model: str
    size_class: str
    began: float
    count: int = 0
    ended: float = 0.0
    encodes: int = 0
    has_failed: bool = False
    done: list[tuple[Job, Outcome]] = field(default_factory=list)


class Watch:
    """Follows a run's events, and tells what is to be kept of them."""

    def __init__(
        self,
        plan: Plan,
        config: RunConfig,
        *,
        began: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`began`: a reading of `clock` at which the run's command was given."""
        self._clock, self._began = clock, began
        self._jobs = plan.by_id
        self._config = config
        self._processors = Processors.read()
        self._phases: dict[str, dict[str, Sample]] = defaultdict(dict)
        self._groups: dict[tuple[str, str], _Seen] = {}
        self._model = ""
        self._first: float | None = None
        self._last = began
        self._encodes = 0

    def add(self, event: Event) -> None:
        match event:
            case ModelLoading():
                self._begins(event.model)
            case ModelLoaded():
                self._begins(event.model)
                self._longest("load", Sample(1, 1, event.load_s))
            case PromptsReady() if event.encoded:
                self._longest("embed", Sample(1, event.encoded, event.encode_s))
            case Prewarmed():
                self._longest("prewarm", Sample(event.shapes, 0, event.prewarm_s))
            case GroupStarted():
                self._open(event)
            case JobDone():
                self._ended(event.outcome)
            case JobFailed():
                if seen := self._seen(event.outcome.custom_id):
                    seen.has_failed = True
            case _:
                pass

    def timings(self) -> Iterator[tuple[str, RunTiming]]:
        """Each model that made something, with what it took; what follows the last job until now
        is the run's end.
        """
        end_s = self._clock() - self._last
        others = Processors.read().others_since(self._processors)
        count = threads(self._config.parallel.replicas)
        for model, phases in self._phases.items():
            groups = tuple(
                timing
                for seen in self._groups.values()
                if seen.model == model and (timing := self._timing(seen))
            )
            if groups:
                of_run = phases | self._around(end_s)
                yield model, RunTiming(count, others, of_run, groups)

    def _around(self, end_s: float) -> dict[str, Sample]:
        """What the command takes before it loads a model, and behind its last job."""
        jobs = sum(len(seen.done) for seen in self._groups.values())
        start_s = (self._first or self._began) - self._began
        return {"start": Sample(1, 0, start_s), "end": Sample(1, jobs, end_s)}

    def _begins(self, model: str) -> None:
        self._model = model
        self._phases[model] = self._phases[model]
        self._first = self._clock() if self._first is None else self._first

    def _longest(self, phase: str, sample: Sample) -> None:
        """Replicas get ready at the same time: the slowest counts. Groups' shapes add up."""
        phases = self._phases[self._model]
        before = phases.get(phase)
        if before is None:
            phases[phase] = sample
        elif self._config.parallel.replicas > 1:
            phases[phase] = max(before, sample, key=lambda one: one.seconds)
        else:
            phases[phase] = before + sample

    def _open(self, event: GroupStarted) -> None:
        place = event.model, event.size_class
        self._begins(event.model)
        seen = self._groups.setdefault(place, _Seen(*place, self._clock()))
        seen.count += event.job_count

    def _seen(self, custom_id: str) -> _Seen | None:
        """The group that a job is of; None of a job of no plan, or before its group has begun."""
        job = self._jobs.get(custom_id)
        return None if job is None else self._groups.get((job.model, self._size_class(job)))

    def _size_class(self, job: Job) -> str:
        # Asked of the job: a million of them would take more memory than all that is kept here.
        if isinstance(job, VideoJob):
            return size_class_of_video(job.size, job.num_frames)
        return size_class_of(job, registry.model_card(job.model, self._config.model.revision))

    def _ended(self, outcome: Outcome) -> None:
        seen = self._seen(outcome.custom_id)
        if seen is None:
            return
        self._last = seen.ended = self._clock()
        made = outcome.cache.get("source_images", {}).get("misses", 0)
        seen.encodes += max(0, made - self._encodes)
        self._encodes = made
        seen.done.append((self._jobs[outcome.custom_id], outcome))

    def _timing(self, seen: _Seen) -> GroupTiming | None:
        if not seen.done:
            return None
        outcomes = [outcome for _, outcome in seen.done]
        together = {
            stage: max(outcome.batch.get(stage, 1) for outcome in outcomes)
            for stage in ("think", "denoise")
        }
        calls_and_units = work_of(seen.done, seen.encodes, together, self._config.model.revision)
        phases = {
            part: Sample(*calls_and_units[part], _seconds(outcomes, names))
            for part, names in _PARTS.items()
        }
        is_whole = len(seen.done) == seen.count and not seen.has_failed
        if is_whole and self._config.parallel.replicas == 1:
            rest_s = seen.ended - seen.began - summed(phases.values()).seconds
            phases["rest"] = Sample(seen.count, 0, max(0.0, rest_s))
        wanted = _wanted(seen.done, self._config.batch.max_size)
        limits = {stage: most for stage, most in together.items() if most < wanted[stage]}
        return GroupTiming(seen.size_class, len(seen.done), phases, limits, _texts(seen.done))


def work_of(
    done: Sequence[tuple[Job, Outcome]],
    encodes: int,
    together: Mapping[str, int],
    revision: str | None,
) -> dict[str, tuple[float, float]]:
    """Calls and units of each phase of a group's finished jobs."""
    jobs = len(done)
    pixels = sum(file.width * file.height * _frames(file) for _, o in done for file in o.outputs)
    written = [tokens_written(outcome) for _, outcome in done]
    reports = [(outcome, outcome.kv_reuse) for _, outcome in done if outcome.kv_reuse]
    prefilled = sum(
        one.ar_prefill_tokens + sum(branch.computed for branch in one.branches)
        for _, one in reports
    )
    cells = sum(
        full_steps(outcome) * sum(branch.per_step for branch in one.branches)
        for outcome, one in reports
    )
    forwards = sum(full_steps(o) / o.batch.get("denoise", 1) for _, o in done)
    videos = [(job, full_steps(o)) for job, o in done if isinstance(job, VideoJob)]
    if videos:
        forwards = sum(steps * job.branch_count for job, steps in videos)
        cells = sum(steps * job.branch_count * latent_cells(job, revision) for job, steps in videos)
    return {
        "encode": (jobs, encodes),
        "prefill": (jobs, prefilled),
        "think": (decode_steps(written, together["think"]), sum(written)),
        "denoise": (forwards, cells),
        "decode": (jobs, pixels),
    }


def _wanted(done: Sequence[tuple[Job, Outcome]], most: int) -> dict[str, int]:
    """Jobs of a group that would work together, by stage, if memory had room for all."""
    writers = sum(tokens_written(outcome) > 0 for _, outcome in done)
    alike = Counter((outcome.denoise_steps, outcome.ratio_index) for _, outcome in done)
    of_pictures = max(alike.values()) if isinstance(done[0][0], ImageJob) else 1
    return {"think": min(most, writers), "denoise": min(most, of_pictures)}


def full_steps(outcome: Outcome) -> int:
    """Denoise steps of a run that evaluated the model; a step cache counts earlier runs', too."""
    cache, steps = outcome.step_cache, outcome.denoise_steps
    return steps if cache is None else min(cache.full, steps)


def decode_steps(lengths: Sequence[float], together: int) -> float:
    """Forwards in which texts of these lengths are written, so many at a time."""
    return max(math.ceil(sum(lengths) / together), max(lengths, default=0))


def tokens_written(outcome: Outcome) -> int:
    """Tokens that the text stage decoded for a job."""
    reuse = outcome.kv_reuse
    return 0 if reuse is None else reuse.ar_decode_tokens + reuse.ar_surplus_tokens


def latent_cells(job: VideoJob, revision: str | None) -> int:
    """Latent frames by rows by columns of a video."""
    return math.prod(registry.video_card(job.model, revision).latent_grid(job.size, job.num_frames))


def _frames(file: object) -> int:
    return file.num_frames if isinstance(file, VideoFile) else 1


def _seconds(outcomes: Sequence[Outcome], names: Sequence[str]) -> float:
    return sum(outcome.share_s.get(name, 0.0) for outcome in outcomes for name in names)


def _texts(done: Sequence[tuple[Job, Outcome]]) -> dict[str, TextLengths]:
    by_task: dict[str, list[int]] = defaultdict(list)
    for job, outcome in done:
        if isinstance(job, ImageJob) and (written := tokens_written(outcome)):
            by_task[job.bot_task].append(written)
    return {task: TextLengths(len(of), sum(of) / len(of), max(of)) for task, of in by_task.items()}
