"""What happens when a job fails: the only place that decides it.

    it shared a forward         its batch runs in halves, until a job fails alone: `choose_remedy`
    memory was short            what is kept for others is dropped, then others go first, then the
                                job fails: `choose_remedy`
    the cause may be temporary  it is tried again after the others of its group: `with_retries`
    its process died            it is tried again, alone; at the next death it fails: `isolate`
    every job would fail        the run ends, or only that replica: `machine_fault`, `is_of_replica`
    many failed, or in a row    the run ends: `FailureLimit`
    it failed                   its line, and the exit code of the run: `failed_job`, `exit_code`

Others carry it out: `out_of_memory` inside a stage, `engine/recorder`, and `engine/replicas`. A
later run leaves failed jobs alone, unless it has `--retry-failed`: `journal/resume`. This module
does not import torch.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import count
from typing import Any

from hyimg_cli.errors import (
    CheckpointError,
    ConsecutiveErrors,
    HyimgError,
    MachineError,
    ReplicaError,
    RunHalted,
    StorageError,
)
from hyimg_cli.journal.keys import finishing_key, key_of, source_digest
from hyimg_cli.settings.run import FailurePolicy, RunConfig
from hyimg_cli.spec.events import Event, Failure, JobEnded, JobStarted, Outcome
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.units import counted

logger = logging.getLogger(__name__)
# A job at which so many processes died fails.
_MOST_DEATHS = 2
# A replica that dies this often without finishing a job in between is not restarted.
MOST_DEATHS_OF_REPLICA = 3
# Hints for a single job that ran out of memory.
_SMALLER: Mapping[type[Job], str] = {
    ImageJob: (
        "use --quantization fp8 or nf4, --vae-use-tiling (changes pixels near tile borders), or "
        "a smaller size"
    ),
    VideoJob: "use --enable-cpu-offload, a smaller size or fewer frames",
}


class Remedy(Enum):
    """The next attempt at jobs that have failed together; no remedy changes a pixel."""

    SPLIT = auto()  # run the batch in halves, or only the jobs that fitted into memory
    RETRY = auto()  # try again after dropping what is kept for others
    REQUEUE = auto()  # try again when other jobs have freed their memory
    FAIL = auto()  # the job fails; its line names the setting that needs less


def choose_remedy(
    jobs: int, *, is_short: bool, has_company: bool, has_dropped: bool, can_wait: bool
) -> Remedy:
    """Return the next attempt at so many `jobs` of one forward; only a job alone can fail.

    `is_short`: out of memory. `has_company`: other jobs hold memory that they need not hold now.
    `has_dropped`: RETRY was tried. `can_wait`: other jobs will free memory.
    """
    if jobs > 1 or (is_short and has_company):
        return Remedy.SPLIT
    if is_short and not has_dropped:
        return Remedy.RETRY
    return Remedy.REQUEUE if is_short and can_wait else Remedy.FAIL


def retries_of(failure: Failure, policy: FailurePolicy) -> int:
    """Return how often a job is tried again that fails like this each time."""
    return policy.max_retries if failure.retryable else 0


def with_retries(
    jobs: Sequence[Job],
    run: Callable[[Sequence[Job]], Iterator[Event]],
    limit: "FailureLimit",
) -> Iterator[Event]:
    """Yield the events of jobs that `run` runs, and tries again after the other ones.

    Of a job that is tried again, only the last end is yielded.
    """
    by_id = {job.custom_id: job for job in jobs}
    again: dict[str, JobEnded] = {}
    for retries in count():
        # The earlier ends of jobs that this pass tries again.
        before, again = again, {}
        for event in run(jobs):
            is_final = True
            if isinstance(event, JobEnded):
                before.pop(event.outcome.custom_id, None)
                error = event.outcome.error
                if error is not None and retries < retries_of(error, limit.policy):
                    is_final, again[event.outcome.custom_id] = False, event
            limit.add(event, is_final=is_final)
            if is_final:
                yield event
        yield from before.values()  # their retries were cut off by the end of the run
        if limit.is_over or not again:
            break
        jobs = [by_id[name] for name in again]
    yield from again.values()


def isolate(
    jobs: Sequence[Job], deaths: Mapping[str, Sequence[str]]
) -> tuple[list[Sequence[Job]], list[Job]]:
    """Return jobs as batches to run one after the other, and the jobs that fail.

    `deaths`: how processes died at a job, by custom_id. Such a job comes last, alone.
    """
    suspects = [job for job in jobs if deaths.get(job.custom_id)]
    failed = [job for job in suspects if len(deaths[job.custom_id]) >= _MOST_DEATHS]
    alone = [[job] for job in suspects if job not in failed]
    return [[job for job in jobs if job not in suspects], *alone], failed


def failed_job(
    job: Job, config: RunConfig, attempt: int, error: Exception, **facts: Any
) -> Outcome:
    """Return the line of a job that failed in this attempt; `facts` are further fields.

    Raises MachineError if every later job would fail too. The traceback of any error that is not a
    HyimgError is logged as a bug.
    """
    if (fault := machine_fault(error)) is not None:
        raise fault
    if is_out_of_memory(error):
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
    """Return the machine error that would also fail every later job; None for other errors.

    A LoRA that does not fit belongs to the jobs that name it.
    """
    if isinstance(error, MachineError):
        return None if error.code.startswith("lora.") else error
    if not _is_of_torch(error, "AcceleratorError"):
        return None
    what, hint = str(error).split("\n")[0], "run the same command again"
    return MachineError(f"the GPU failed: {what}", hint=hint, code="machine.gpu")


def engine_fault(error: BaseException) -> HyimgError:
    """Return the error for the jobs of a server whose engine ended by `error`; a bug is logged."""
    if isinstance(error, HyimgError):
        return error
    if (fault := machine_fault(error)) is not None:
        return fault
    logger.error("the engine stopped because of a bug in hyimg", exc_info=error)
    what = f"the engine failed: {type(error).__name__}: {error}"
    hint = "this is a bug: please report it; batches resume when the server starts again"
    return MachineError(what, hint=hint, code="machine.engine")


def is_of_replica(error: HyimgError) -> bool:
    """True if the error that ended a replica is about its GPU, and so about no other replica.

    Faults of checkpoints and disks affect all.
    """
    return isinstance(error, MachineError) and not isinstance(error, CheckpointError | StorageError)


def exit_code(*counts: int) -> int:
    """Return the exit code of a run that came to its end; `counts` of what failed in it."""
    return 1 if any(counts) else 0


def policy_of_server(policy: FailurePolicy) -> FailurePolicy:
    """Return the policy of a server: failed requests never end it."""
    return replace(
        policy,
        fail_fast=False,
        max_consecutive_errors=0,
        halt=None,
        time_limit=None,
        job_timeout=None,
    )


def failed_line(custom_id: str, faults: Sequence[HyimgError]) -> Outcome:
    """Return the result line of an invalid manifest line, with the code of its first fault."""
    message = "; ".join(f"{one.where}: {one.what}" for one in faults)
    hint = "; ".join(dict.fromkeys(one.hint for one in faults if one.hint))
    failure = Failure(faults[0].code, message, hint, retryable=False)
    return Outcome(custom_id, "failed", key="", attempt=0, error=failure)


def replicas_died(deaths: Sequence[str]) -> ReplicaError:
    """Return the error of a job at which so many replicas died."""
    return ReplicaError(
        f"the processes that worked on it died: {', then '.join(deaths)}",
        hint="memory may be short (signal 9): check the system log, then use --retry-failed with "
        "fewer --replicas or a smaller --batching-max-size",
        code="replica.died",
        retryable=True,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory of a device was short."""
    return _is_of_torch(error, "OutOfMemoryError")


def _is_of_torch(error: BaseException, name: str) -> bool:
    """True for this torch error class; False if torch has not been imported."""
    kind = getattr(sys.modules.get("torch"), name, None)
    return kind is not None and isinstance(error, kind)


class FailureLimit:
    """Counts a run's failures; by its policy the first, several in a row, or many end the run.

    `policy.halt` is a number here: see `FailurePolicy.for_run`.

    Jobs are in a row if they were started one after the other. Jobs that are still at work separate
    failures before and after them. A source that cannot be read does not count in a row, because
    its job never reached the model.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.is_over = False
        # In order of start: the failure of each job; None for a job that is at work or done.
        self._errors: list[Failure | None] = []
        self._at_work: dict[str, int] = {}
        self._in_a_row: list[Failure] = []
        # Of jobs that are not tried again.
        self.failed: list[Failure] = []

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
                most = self.policy.max_consecutive_errors
                if most and not self._in_a_row:
                    first = last = at
                    while first > 0 and self._errors[first - 1] is not None:
                        first -= 1
                    while last + 1 < len(self._errors) and self._errors[last + 1] is not None:
                        last += 1
                    row = [one for one in self._errors[first : last + 1] if one is not None]
                    row = [one for one in row if not one.code.startswith("source.")]
                    self._in_a_row = row if len(row) >= most else []
                if is_final and event.outcome.error is not None:
                    self.failed.append(event.outcome.error)
                self.is_over |= bool(self._in_a_row) or (is_final and self.policy.fail_fast)
                self.is_over |= self._is_halted

    @property
    def _is_halted(self) -> bool:
        """True if as many jobs have failed as the policy allows."""
        return self.policy.halt is not None and len(self.failed) >= int(self.policy.halt)

    def raise_fault(self) -> None:
        """Raise ConsecutiveErrors if too many jobs failed in a row, with their most common fault.

        Raises RunHalted if too many failed in all. Does nothing if another failure ended the run.
        """
        row = self._in_a_row
        if not row and self._is_halted:
            ((code, most),) = Counter(one.code for one in self.failed).most_common(1)
            count = counted(len(self.failed), "job")
            raise RunHalted(
                f"{count} failed, as many as --halt allows; {most} of them {code}",
                hint="fix their common cause, then run the same command with --retry-failed; "
                "--halt none never stops",
            )
        if not row:
            return
        ((code, most),) = Counter(one.code for one in row).most_common(1)
        message = next(one.message for one in reversed(row) if one.code == code)
        raise ConsecutiveErrors(
            f"{len(row)} errors in a row, {'all' if most == len(row) else most} of them {code}: "
            f"{message}",
            hint="fix their common cause, then run the same command with --retry-failed; "
            "--max-consecutive-errors 0 never stops",
        )
