"""A job on its way through a pipeline, and the two ways to leave it: finished, or lost."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hyimg_cli.pipelines.clock import PhaseClock
from hyimg_cli.spec.job import Job

OneJob = TypeVar("OneJob", bound=Job, covariant=True)


@dataclass(eq=False)
class Request(Generic[OneJob]):
    """A job that has begun: its clock, and what its line will say: `warnings` of what was degraded,
    `notes` on how its inputs were read.

    `warnings_if_lost` stand there too where it fails: what its next attempt need not do. `edit`:
    what is known of how its picture was put back on its source. `source_digests`: of the images
    that were read for it.
    """

    job: OneJob
    clock: PhaseClock
    warnings: list[str] = field(default_factory=list)
    warnings_if_lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edit: dict[str, Any] | None = None
    source_digests: tuple[str, ...] = ()


@dataclass(eq=False)
class Work(Generic[OneJob]):
    """A form of a request behind one of its stages; each stage adds its own fields."""

    request: Request[OneJob]

    @property
    def job(self) -> OneJob:
        return self.request.job

    @property
    def clock(self) -> PhaseClock:
        return self.request.clock

    @property
    def warnings(self) -> list[str]:
        return self.request.warnings

    @property
    def source_digests(self) -> tuple[str, ...]:
        return self.request.source_digests


@dataclass(eq=False)
class Finished(Work[OneJob]):
    """The last form: pixels that are not written yet."""


@dataclass(eq=False)
class Lost(Work[OneJob]):
    """A request that failed."""

    error: Exception
