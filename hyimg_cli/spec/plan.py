"""All jobs of a run in the order in which they will be done."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hyimg_cli.spec.job import ImageJob, Job, VideoJob


@dataclass(frozen=True)
class Group:
    """Jobs of one model and one size class; jobs with the same source images stand side by side."""

    model: str
    size_class: str
    jobs: tuple[ImageJob, ...]


@dataclass(frozen=True)
class VideoGroup:
    """Videos of one model, size and number of frames; equal prompts stand side by side."""

    model: str
    size_class: str
    jobs: tuple[VideoJob, ...]


@dataclass(frozen=True)
class Plan:
    """Groups in order. A plan is a permutation of the jobs it was made from."""

    groups: tuple[Group | VideoGroup, ...]

    @cached_property
    def by_id(self) -> Mapping[str, Job]:
        """The jobs by custom_id: one index for all who ask, for there may be a million."""
        return {job.custom_id: job for group in self.groups for job in group.jobs}

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(job for group in self.groups for job in group.jobs)

    def jobs_of_model(self, model: str) -> tuple[Job, ...]:
        """The jobs of one model, in order."""
        return tuple(job for group in self.groups if group.model == model for job in group.jobs)
