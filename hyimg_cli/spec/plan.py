"""All jobs of a run in the order in which they will be done."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from hyimg_cli.spec.job import ImageJob, Job, VideoJob


@dataclass(frozen=True)
class Group:
    """Jobs of one model and one size class; jobs with the same source images are adjacent."""

    model: str
    size_class: str
    jobs: tuple[ImageJob, ...]


@dataclass(frozen=True)
class VideoGroup:
    """Videos of one model, size and number of frames; equal prompts are adjacent."""

    model: str
    size_class: str
    jobs: tuple[VideoJob, ...]


class Begun(NamedTuple):
    """Latents of a job that an earlier run kept, after the first `step` of its denoise `steps`."""

    step: int = 0
    steps: int = 1

    @property
    def is_denoised(self) -> bool:
        """True if only the decode is left."""
        return self.step == self.steps


@dataclass(frozen=True)
class Plan:
    """Groups in order. A plan is a permutation of the jobs it was made from.

    `begun`: the jobs that an earlier run has started, by custom_id.
    """

    groups: tuple[Group | VideoGroup, ...]
    begun: Mapping[str, Begun] = field(default_factory=dict)

    def begun_of(self, job: Job) -> Begun:
        """Return how far an earlier run came with a job."""
        return self.begun.get(job.custom_id, Begun())

    @cached_property
    def by_id(self) -> Mapping[str, Job]:
        """The jobs by custom_id: one shared index, because there may be a million."""
        return {job.custom_id: job for group in self.groups for job in group.jobs}

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(job for group in self.groups for job in group.jobs)

    def without(self, names: Collection[str]) -> "Plan":
        """Return the plan without the jobs of these ids."""
        found = list[Group | VideoGroup]()
        for group in self.groups:
            one: Any = group
            if jobs := tuple(job for job in group.jobs if job.custom_id not in names):
                found.append(replace(one, jobs=jobs))
        return replace(self, groups=tuple(found))

    def jobs_of_model(self, model: str) -> tuple[Job, ...]:
        """Return the jobs of one model, in order."""
        return tuple(job for group in self.groups if group.model == model for job in group.jobs)
