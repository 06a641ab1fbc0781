"""A job on its way through a pipeline, and the two ways to leave it: finished, or lost."""

from dataclasses import dataclass, field, fields
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
    that were read for it. Behind each stage it has another form, with what that stage adds.
    """

    job: OneJob
    clock: PhaseClock
    warnings: list[str] = field(default_factory=list)
    warnings_if_lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edit: dict[str, Any] | None = None
    source_digests: tuple[str, ...] = ()

    def as_begun(self) -> "Request[OneJob]":
        """The request alone: what its stages have made is not held by it."""
        return Request(*(getattr(self, field.name) for field in fields(Request)))

    def as_lost(self, error: Exception) -> "Lost[OneJob]":
        """The request that failed by `error`."""
        return Lost(**vars(self.as_begun()), error=error)


@dataclass(eq=False)
class Finished(Request[OneJob]):
    """The last form: pixels that are not written yet."""


@dataclass(eq=False, kw_only=True)
class Lost(Request[OneJob]):
    """A request that failed."""

    error: Exception
