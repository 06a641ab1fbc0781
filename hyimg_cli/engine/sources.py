"""Source pictures looked at before a model is loaded: which cannot be read, and who wanted them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.errors import HyimgError, SourceImageError, UsageError
from hyimg_cli.journal.keys import key_of, source_digests
from hyimg_cli.media.images import probe_image
from hyimg_cli.spec.events import Failure, Outcome
from hyimg_cli.spec.job import ImageJob, Job, Size, SizeRequest
from hyimg_cli.spec.run import RunConfig
from hyimg_cli.spec.units import counted

# So many are named.
MOST_NAMED = 10
_MISSING = "source.missing"


@dataclass(frozen=True)
class SourcesSeen:
    """The source pictures of some jobs by path: their sizes, or why they cannot be read."""

    sizes: Mapping[str, Size]
    errors: Mapping[str, SourceImageError]

    @property
    def count(self) -> int:
        return len(self.sizes) + len(self.errors)

    def error_of(self, job: Job) -> SourceImageError | None:
        """Why a job cannot be tried, if so."""
        return next((self.errors[path] for path in job.images if path in self.errors), None)

    def leaves_none(self, jobs: Sequence[Job]) -> bool:
        """Tell if there are jobs, and none of them can be tried."""
        return bool(jobs) and all(self.error_of(job) for job in jobs)

    def sentences(self) -> Iterator[str]:
        """How many are missing, and how many are there and of no use."""
        missing = sum(error.code == _MISSING for error in self.errors.values())
        for count, what in ((missing, "missing"), (len(self.errors) - missing, "unreadable")):
            if count:
                of = counted(self.count, "source")
                yield f"{count} of {of} {'is' if count == 1 else 'are'} {what}"

    def named(self) -> Iterator[str]:
        """The sentences, and the first that they are about."""
        yield from self.sentences()
        for error in list(self.errors.values())[:MOST_NAMED]:
            yield f"  {error.where}" + (f": {error.what}" if error.code != _MISSING else "")
        if len(self.errors) > MOST_NAMED:
            rest = len(self.errors) - MOST_NAMED
            yield f"  and {rest} more; hyimg check --json names every one"


def turned_sizes(found: SourcesSeen, jobs: Sequence[Job]) -> Iterator[str]:
    """A sentence where edits ask for the shape of their source, turned: `HxW` was meant."""
    edits = [
        (job, found.sizes[job.images[0]])
        for job in jobs
        if isinstance(job, ImageJob) and job.images and job.images[0] in found.sizes
    ]
    turned = [(job, size) for job, size in edits if _is_turned(job.size, size)]
    if turned:
        (job, size), more = turned[0], len(turned) - 1
        yield (
            f"{job.source_line}{f' and {more} more' if more else ''}: size is WIDTHxHEIGHT; "
            f"{job.size} is the shape of the source ({size}) turned, as the official script "
            "writes it, height first"
        )


def _is_turned(asked: SizeRequest, source: Size) -> bool:
    if asked.is_auto or asked.is_ratio or asked.height == asked.width:
        return False
    ratio, turned = source.width / source.height, asked.height / asked.width
    return (ratio > 1) == (turned > 1) and abs(math.log(ratio / turned)) < 0.05


def seen(jobs: Sequence[Job], *, decode: bool = False) -> SourcesSeen:
    """The jobs' source pictures, each looked at once: at its head alone, unless `decode`."""
    sizes: dict[str, Size] = {}
    errors: dict[str, SourceImageError] = {}
    for path in dict.fromkeys(path for job in jobs for path in job.images):
        try:
            sizes[path] = probe_image(Path(path), decode=decode)[0]
        except SourceImageError as error:
            errors[path] = error
    return SourcesSeen(sizes, errors)


def refuse_hopeless(found: SourcesSeen, jobs: Sequence[Job], tried: Mapping[str, object]) -> None:
    """Raise UsageError where no job can be tried, and none was before."""
    if found.leaves_none(jobs) and not any(job.custom_id in tried for job in jobs):
        hint = next((error.hint for error in found.errors.values() if error.hint), "")
        what = f"no job has its source pictures: {', '.join(found.sentences())}"
        raise UsageError(what, hint=hint, code="source.none")


def faults(found: SourcesSeen, jobs: Sequence[Job]) -> list[HyimgError]:
    """Faults of the source pictures, with the line that names each."""
    return [
        SourceImageError(
            error.what, where=f"{job.source_line}: {path}", hint=error.hint, code=error.code
        )
        for job in jobs
        for path in job.images
        if (error := found.errors.get(path))
    ]


def untried(job: Job, error: SourceImageError, attempts: int, config: RunConfig) -> Outcome:
    """The line of a job that fails before any model is loaded; it was tried so often before."""
    return Outcome(
        custom_id=job.custom_id,
        status="failed",
        key=key_of(job, source_digests(job), config),
        attempt=attempts + 1,
        error=Failure(error.code, f"{error.where}: {error.what}", error.hint, error.retryable),
        metadata=json.loads(job.metadata_json),
        extra=json.loads(job.extra_json),
    )
