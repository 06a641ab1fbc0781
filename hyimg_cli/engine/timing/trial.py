"""A trial of a plan: a few of its jobs, run for their seconds alone. Nothing of them is kept."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from hyimg_cli.engine.choice import RunsPlans
from hyimg_cli.engine.timing.observed import GroupTiming, RunTiming, summed
from hyimg_cli.engine.timing.watch import Watch
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.spec.events import Event
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Group, Plan, VideoGroup
from hyimg_cli.spec.run import OutputConfig, RunConfig

OneJob = TypeVar("OneJob", bound=Job)
_OF_A_SHAPE = 2
# What a full batch is tried with: enough to see what a forward of so many takes.
_STEPS, _TOKENS = 3, 8


@dataclass
class Trial:
    """What a trial has found: timings by model.

    `began`: a reading of the performance counter at which its command was given.
    """

    began: float
    timings: dict[str, RunTiming] = field(default_factory=dict)

    def add(self, model: str, timing: RunTiming) -> None:
        """One more part of it: its groups stand beside the others, its phases add up."""
        before = self.timings.get(model)
        if before is not None:
            names = before.phases.keys() | timing.phases.keys()
            parts = (before.phases, timing.phases)
            phases = {name: summed(of[name] for of in parts if name in of) for name in names}
            timing = replace(timing, phases=phases, groups=before.groups + timing.groups)
        self.timings[model] = replace(timing, is_trial=True)


def trial_config(config: RunConfig, folder: Path) -> RunConfig:
    """How a trial is run: as the plan, by one session, with results in `folder`."""
    output = OutputConfig(folder, metadata=config.output.metadata, frames=config.output.frames)
    return replace(config, output=output, parallel=replace(config.parallel, replicas=1))


def plans(plan: Plan, most: int) -> list[Plan]:
    """What is run: of full batches a few steps first, then two jobs of each shape as they are."""
    pairs = Plan(tuple(_some(group) for group in plan.groups))
    full = [
        _stand_ins(group, place, min(most, len(group.jobs)))
        for place, (group, few) in enumerate(zip(plan.groups, pairs.groups, strict=True))
        if isinstance(group, Group) and min(most, len(group.jobs)) > len(few.jobs)
    ]
    return [*([Plan(tuple(full))] if full else []), pairs]


def tried(
    plan: Plan, config: RunConfig, open_session: Callable[[RunConfig], RunsPlans], found: Trial
) -> Generator[Event, None, None]:
    """Run the trial of `plan` in a folder of its own that is gone afterwards; tells its events.

    `open_session` gives what runs it. What it takes is added to `found`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hyimg-trial-") as place,
        closing(open_session(of_trial := trial_config(config, Path(place)))) as session,
    ):
        parts = plans(plan, config.batch.max_size)
        for number, part in enumerate(parts):
            is_first, is_whole = number == 0, number == len(parts) - 1
            watch = Watch(part, of_trial, began=found.began)
            folder = RunFolder(Path(place) / str(number))
            with folder, closing(session.run(part, folder)) as events:
                for event in events:
                    watch.add(event)
                    yield event
            for model, timing in watch.timings():
                around = {"end"} if is_first else {"start", "end"}
                phases = {name: one for name, one in timing.phases.items() if name not in around}
                groups = timing.groups if is_whole else tuple(map(_without_texts, timing.groups))
                found.add(model, replace(timing, phases=phases, groups=groups))


def _without_texts(group: GroupTiming) -> GroupTiming:
    """Without the lengths of texts that were cut short."""
    return replace(group, texts={})


def _some(group: Group | VideoGroup) -> Group | VideoGroup:
    """The group with the first jobs of each shape."""
    if isinstance(group, Group):
        return replace(group, jobs=tuple(_firsts(group.jobs, _picture_shape)))
    return replace(group, jobs=tuple(_firsts(group.jobs, lambda job: job.branch_count)))


def _firsts(jobs: Iterable[OneJob], shape: Callable[[OneJob], Hashable]) -> Iterator[OneJob]:
    seen: dict[Hashable, int] = defaultdict(int)
    for job in jobs:
        seen[shape(job)] += 1
        if seen[shape(job)] <= _OF_A_SHAPE:
            yield job


def _picture_shape(job: ImageJob) -> Hashable:
    guided = job.guidance_scale > 1
    return len(job.images), job.bot_task, job.writes_text, job.num_inference_steps, guided


def _stand_ins(group: Group, place: int, count: int) -> Group:
    """As many jobs of the group in that place as work together, with few steps and short texts."""
    jobs = tuple(
        replace(
            job,
            custom_id=f"trial-{place}-{number}",
            num_inference_steps=min(_STEPS, job.num_inference_steps),
            text=replace(job.text, max_new_tokens=min(_TOKENS, job.text.max_new_tokens)),
        )
        for number, job in enumerate(group.jobs[:count])
    )
    return replace(group, jobs=jobs)
