"""Handle failed jobs: the cause, the job's line, retries, and whether the run ends.

This module does not import torch.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hyimg_cli.errors import ConsecutiveErrors, HyimgError, MachineError, ReplicaError
from hyimg_cli.journal.keys import finishing_key, key_of, source_digest
from hyimg_cli.settings.run import FailurePolicy, RunConfig
from hyimg_cli.spec.events import Event, Failure, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

logger = logging.getLogger(__name__)
# Hints for a single job that ran out of memory.
_SMALLER: Mapping[type[Job], str] = {
    ImageJob: (
        "use --quantization fp8 or nf4, --vae-use-tiling (changes pixels near tile borders), or "
        "a smaller size"
    ),
    VideoJob: "use --enable-cpu-offload, a smaller size or fewer frames",
}


def failed_job(
    job: Job, config: RunConfig, attempt: int, error: Exception, **facts: Any
) -> Outcome:
    """Return the line of a job that failed in this attempt; `facts` are further fields.

    Raises MachineError if every later job would fail too. The traceback of any error that is not a
    HyimgError is logged as a bug.
    """
    if (fault := machine_fault(error)) is not None:
        raise fault
    if _is_of_torch(error, "OutOfMemoryError"):
        what = str(error).split("\n")[0]
        failure = Failure("job.out-of-memory", what, _SMALLER[type(job)], retryable=True)
    else:
        failure = Failure.of(error)
        if not isinstance(error, HyimgError):
            logger.error("job %s failed because of a bug in hyimg", job.custom_id, exc_info=error)
    said = {
        "error": failure,
        "finishing_key": finishing_key(job, config.output),
        **job.copied(),
    }
    key = key_of(job, [*map(source_digest, job.images)], config)
    return Outcome(job.custom_id, "failed", key, attempt, **(said | facts))


def machine_fault(error: BaseException) -> MachineError | None:
    """Return the machine error that would also fail every later job; None for other errors."""
    if isinstance(error, MachineError):
        return error
    if not _is_of_torch(error, "AcceleratorError"):
        return None
    what, hint = str(error).split("\n")[0], "run the same command again"
    return MachineError(f"the GPU failed: {what}", hint=hint, code="machine.gpu")


def failed_line(custom_id: str, faults: Sequence[HyimgError]) -> Outcome:
    """Return the result line of an invalid manifest line, with the code of its first fault."""
    message = "; ".join(f"{one.where}: {one.what}" for one in faults)
    hint = "; ".join(dict.fromkeys(one.hint for one in faults if one.hint))
    failure = Failure(faults[0].code, message, hint, retryable=False)
    return Outcome(custom_id, "failed", key="", attempt=0, error=failure)


def replicas_died(deaths: Sequence[str]) -> ReplicaError:
    """Return the error of a job at which replicas died until it was given up."""
    return ReplicaError(
        f"the processes that worked on it died: {', then '.join(deaths)}",
        hint="memory may be short (signal 9): check the system log, then use --retry-failed with "
        "fewer --replicas or a smaller --batching-max-size",
        code="replica.died",
        retryable=True,
    )


def _is_of_torch(error: BaseException, name: str) -> bool:
    """True for this torch error class; False if torch has not been imported."""
    kind = getattr(sys.modules.get("torch"), name, None)
    return kind is not None and isinstance(error, kind)


class FailureLimit:
    """Counts a run's failures; by its policy the first, or several in a row, end the run.

    Jobs are in a row if they were started one after the other. Jobs that are still at work separate
    failures before and after them. A source that cannot be read does not count, because its job
    never reached the model.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self.is_over = False
        # In order of start: the failure of each job; None for a job that is at work or done.
        self._errors: list[Failure | None] = []
        self._at_work: dict[str, int] = {}
        self._in_a_row: list[Failure] = []

    def add(self, event: Event, *, is_final: bool = True) -> None:
        """Count an event, which may end the run. `is_final` False: the job will be tried again."""
        match event:
            case JobStarted():
                self._at_work[event.custom_id] = len(self._errors)
                self._errors.append(None)
            case JobEnded() if event.is_done:
                self._at_work.pop(event.outcome.custom_id, None)
            case JobEnded():
                at = self._at_work.pop(event.outcome.custom_id, len(self._errors))
                self._errors[at : at + 1] = [event.outcome.error]
                most = self._policy.max_consecutive_errors
                if most and not self._in_a_row:
                    first = last = at
                    while first > 0 and self._errors[first - 1] is not None:
                        first -= 1
                    while last + 1 < len(self._errors) and self._errors[last + 1] is not None:
                        last += 1
                    row = [one for one in self._errors[first : last + 1] if one is not None]
                    row = [one for one in row if not one.code.startswith("source.")]
                    self._in_a_row = row if len(row) >= most else []
                self.is_over |= bool(self._in_a_row) or (is_final and self._policy.fail_fast)

    def raise_fault(self) -> None:
        """Raise ConsecutiveErrors if too many jobs failed in a row, with their most common fault.

        Does nothing if another failure ended the run.
        """
        row = self._in_a_row
        if not row:
            return
        ((code, count),) = Counter(one.code for one in row).most_common(1)
        message = next(one.message for one in reversed(row) if one.code == code)
        raise ConsecutiveErrors(
            f"{len(row)} errors in a row, {'all' if count == len(row) else count} of them {code}: "
            f"{message}",
            hint="fix their common cause, then run the same command with --retry-failed; "
            "--max-consecutive-errors 0 never stops",
        )
