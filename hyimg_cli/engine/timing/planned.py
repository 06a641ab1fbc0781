"""The work of a plan in the measures that runs are timed by: calls and units of each phase."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from hyimg_cli.engine.timing.observed import GroupTiming, TextLengths
from hyimg_cli.engine.timing.watch import decode_steps, latent_cells
from hyimg_cli.errors import SourceImageError
from hyimg_cli.journal.keys import precision
from hyimg_cli.manifest.cost import Cost, PlanCost
from hyimg_cli.manifest.texts import text_of
from hyimg_cli.manifest.video_cost import FEWEST_PREWARMED, strings
from hyimg_cli.media.images import size_of
from hyimg_cli.models import registry
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Group, Plan, VideoGroup
from hyimg_cli.spec.run import RunConfig
from hyimg_cli.spec.step_cache import count_full

Measures = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class GroupWork:
    """A group's phases: calls and units of each; `shapes` that are new are prewarmed."""

    model: str
    size_class: str
    jobs: int
    phases: Measures
    shapes: int = 0
    strings: frozenset[str] = field(default_factory=frozenset)


def works(
    plan: Plan, costs: PlanCost, config: RunConfig, kept: Mapping[str, Sequence[GroupTiming]]
) -> list[GroupWork]:
    """Each group of the plan. `kept`: what earlier runs say of a model's groups: how many could
    work together, how long texts were.
    """
    pictures = iter(costs.groups)
    return [
        _of_pictures(group, next(pictures).cost, config, kept.get(group.model, ()))
        if isinstance(group, Group)
        else _of_videos(group, config)
        for group in plan.groups
    ]


def _of_pictures(
    group: Group, cost: Cost, config: RunConfig, kept: Sequence[GroupTiming]
) -> GroupWork:
    card = registry.model_card(group.model, config.model.revision)
    thinking = _together("think", group, config, kept)
    drawing = _together("denoise", group, config, kept)
    writers = {text_of(job): job for job in group.jobs if job.writes_text}
    texts = _lengths(list(writers.values()), cost, kept)
    rounds = sum(
        count_full(rule, card.steps_of(asked)) * ceil(count / drawing)
        for (rule, asked), count in Counter(
            (job.step_cache, job.num_inference_steps) for job in group.jobs
        ).items()
    )
    buckets = [card.bucket_of(job.size) for job in group.jobs]
    sizes = [None if bucket is None else bucket.size for bucket in buckets]
    pixels = sum(card.base_size**2 if s is None else s.height * s.width for s in sizes)
    phases: Measures = {
        "encode": (cost.jobs, cost.image_encodes),
        "prefill": (cost.jobs, cost.ar_prefill_rows + cost.prefix_rows),
        "think": (decode_steps(texts, thinking), sum(texts)),
        "denoise": (rounds, cost.denoise_rows),
        "decode": (cost.jobs, pixels),
        "rest": (cost.jobs, 0),
    }
    shapes = len({_shape(job, config) for job in group.jobs}) if config.batch.prewarm else 0
    return GroupWork(group.model, group.size_class, cost.jobs, phases, shapes)


def _of_videos(group: VideoGroup, config: RunConfig) -> GroupWork:
    jobs = len(group.jobs)
    card = registry.video_card(group.model, config.model.revision, config.model.components)
    forwards = sum(card.evaluated(job) * job.branch_count for job in group.jobs)
    cells = latent_cells(group.jobs[0], config.model.revision)
    pixels = jobs * group.num_frames * group.size.height * group.size.width
    phases: Measures = {
        "encode": (jobs, 0),
        "denoise": (forwards, forwards * cells),
        "decode": (jobs, pixels),
        "rest": (jobs, 0),
    }
    texts = (
        {text for job in group.jobs for text in strings(job)} if config.reuse.prompt_cache else ()
    )
    alike = Counter(job.branch_count for job in group.jobs)
    is_warmed = config.batch.prewarm and precision(config.model)[0] != "cpu"
    shapes = sum(n >= FEWEST_PREWARMED for n in alike.values()) if is_warmed else 0
    return GroupWork(group.model, group.size_class, jobs, phases, shapes, frozenset(texts))


def _together(stage: str, group: Group, config: RunConfig, kept: Sequence[GroupTiming]) -> int:
    """Number of jobs at work at once: as asked, or as few as memory had room for."""
    replicas = min(config.parallel.replicas, len(group.jobs))
    # Pieces that replicas are dealt: half of what would be even, then smaller.
    jobs = len(group.jobs) if replicas == 1 else max(1, len(group.jobs) // (2 * replicas))
    alike = [one.limits for one in kept if one.size_class == group.size_class]
    limits = [one[stage] for one in alike if stage in one]
    most = min(config.batch.max_size, max(limits, default=config.batch.max_size))
    return max(1, min(jobs, most))


def _lengths(jobs: Sequence[ImageJob], cost: Cost, kept: Sequence[GroupTiming]) -> list[float]:
    """Tokens that each job will write, as texts of its kind had; without any, as is assumed."""
    known = {task: [one.texts[task] for one in kept if task in one.texts] for task in _tasks(kept)}
    every = [lengths for of_task in known.values() for lengths in of_task]
    assumed = cost.think_rows / len(jobs) if jobs else 0.0
    found = []
    for number, job in enumerate(jobs):
        of_task = known.get(job.bot_task) or every
        # One of several is as long as the longest that was seen; together they have the mean.
        mean = _mean(of_task) if of_task else assumed
        longest = max((one.longest for one in of_task), default=mean)
        length = longest if number == 0 and len(jobs) > 1 else mean
        found.append(min(length, job.text.max_new_tokens))
    return found


def _tasks(kept: Sequence[GroupTiming]) -> set[str]:
    return {task for one in kept for task in one.texts}


def _mean(of: Sequence[TextLengths]) -> float:
    return sum(one.mean * one.texts for one in of) / sum(one.texts for one in of)


def _shape(job: ImageJob, config: RunConfig) -> tuple[object, ...]:
    """What decides the shapes of a job's forwards, as prewarming tells them apart."""
    card = registry.model_card(job.model, config.model.revision)
    try:
        found = [size_of(path) for path in job.images]
    except SourceImageError:
        return ()
    sources = tuple(card.nearest_bucket(size.height, size.width).size for size in found)
    return sources, str(job.size), job.writes_text, job.guidance_scale > 1
