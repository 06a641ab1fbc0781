"""When failed jobs end a run: the one place that decides."""

from collections import Counter

from hyimg_cli.errors import ConsecutiveErrors
from hyimg_cli.settings.run import FailurePolicy
from hyimg_cli.spec.events import Event, Failure, JobDone, JobFailed, JobStarted


class FailureLimit:
    """Counts a run's failures by its policy: the first one may end it, or so many in a row.

    In a row are jobs that were started one after the other: what fails at once does not count
    together across those that are still at work. A source that cannot be read is its job's own
    fault, which never reached the model.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        # By the order of starts: why a job failed; None of one that is at work, or done.
        self._errors: list[Failure | None] = []
        self._at_work: dict[str, int] = {}
        self._in_a_row: list[Failure] = []

    def ends_run(self, event: Event, *, is_final: bool = True) -> bool:
        """Count an event; True where the run ends with it. `is_final` off: it is tried again."""
        match event:
            case JobStarted():
                self._at_work[event.custom_id] = len(self._errors)
                self._errors.append(None)
            case JobDone():
                self._at_work.pop(event.outcome.custom_id, None)
            case JobFailed():
                self._count(event)
                return bool(self._in_a_row) or (is_final and self._policy.fail_fast)
        return False

    def raise_fault(self) -> None:
        """Raise ConsecutiveErrors where so many failed in a row, with the fault most of them had.

        Passes where another failure ended the run.
        """
        row = self._in_a_row
        if not row:
            return
        ((code, count),) = Counter(one.code for one in row).most_common(1)
        message = next(one.message for one in reversed(row) if one.code == code)
        raise ConsecutiveErrors(
            f"{len(row)} errors in a row, {'all' if count == len(row) else count} of them {code}: "
            f"{message}",
            hint="mend what they share, and run the same command with --retry-failed; "
            "--max-consecutive-errors 0 goes on whatever fails",
        )

    def _count(self, failed: JobFailed) -> None:
        at = self._at_work.pop(failed.outcome.custom_id, len(self._errors))
        self._errors[at : at + 1] = [failed.outcome.error]
        most = self._policy.max_consecutive_errors
        if not most or self._in_a_row:
            return
        first = last = at
        while first > 0 and self._errors[first - 1] is not None:
            first -= 1
        while last + 1 < len(self._errors) and self._errors[last + 1] is not None:
            last += 1
        row = [
            error
            for error in self._errors[first : last + 1]
            if error is not None and not error.code.startswith("source.")
        ]
        self._in_a_row = row if len(row) >= most else []
