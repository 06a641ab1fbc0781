"""All jobs of a run in the order in which they will be done."""

from dataclasses import dataclass

from hyimg_cli.spec.job import ImageJob


@dataclass(frozen=True)
class Group:
    """Jobs of one model and one size class; jobs with the same source images stand side by side."""

    model: str
    size_class: str
    jobs: tuple[ImageJob, ...]


@dataclass(frozen=True)
class Plan:
    """Groups in order. A plan is a permutation of the jobs it was made from."""

    groups: tuple[Group, ...]

    @property
    def jobs(self) -> tuple[ImageJob, ...]:
        return tuple(job for group in self.groups for job in group.jobs)
