"""A run's report: its events shown and counted, result lines as JSON, the summary at its end."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from hyimg_cli.cli.render import Style, json_line, note
from hyimg_cli.cli.sentences import advice, finished, summary
from hyimg_cli.cli.views import View
from hyimg_cli.engine.runner import Summary
from hyimg_cli.errors import Interrupted, StorageError
from hyimg_cli.journal.journal import outcome_to_json
from hyimg_cli.spec.events import Event, JobDone, JobFailed, JobStarted, Outcome
from hyimg_cli.spec.units import counted

SUMMARY = (
    "done",
    "failed",
    "invalid",
    "skipped",
    "left",
    "unchanged",
    "whole",
    "gated",
    "lossy",
    "load_s",
    "prewarm_s",
    "encode_s",
    "compile_s",
    "pictures_s",
    "seconds_per_picture",
)


class Report:
    """Shows a run's events in the style asked for, counts them, and closes with a summary.

    A run that an error ended before its first job has nothing to sum up.
    """

    def __init__(
        self, counts: Summary, style: Style, view: View, *, place: str, again: str, retry: str
    ) -> None:
        self._counts = counts
        self._style = style
        self._place, self._again, self._retry = place, again, retry
        self._view = view
        self._has_begun = False

    def __enter__(self) -> Self:
        self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.__exit__(kind, error, trace)
        if error is None or isinstance(error, Interrupted) or self._has_begun:
            self._close()

    def _close(self) -> None:
        if not self._style.is_quiet:
            note(summary(self._counts, self._place))
            for text in advice(self._counts, again=self._again, retry=self._retry):
                note(text)
        if self._style.as_json:
            facts = {name: getattr(self._counts, name) for name in SUMMARY}
            try:
                json_line({"summary": facts, "output_dir": self._place})
            except (StorageError, BrokenPipeError) as error:  # the jobs have their lines
                note(f"no summary: {error}; {self._place}/results.jsonl says what was done")

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Shows outcomes that no session made: the failures of lines that are no jobs."""
        for outcome in outcomes:
            note(finished(outcome))
            if self._style.as_json:
                json_line(outcome_to_json(outcome))

    def finished_again(self, outcomes: Iterable[Outcome], follow: Callable[[Event], None]) -> None:
        """Shows jobs whose redraws were there, as each is put back on its source, and how many."""
        count = 0
        for outcome in outcomes:
            count += 1
            self._has_begun = True
            self._counts.finish(outcome)
            if outcome.error or not self._style.is_quiet:
                note(finished(outcome))
            if self._style.as_json:
                json_line(outcome_to_json(outcome))
            follow((JobFailed if outcome.error else JobDone)(outcome))
        if not self._style.is_quiet:
            note(f"{counted(count, 'edit')} finished again from the redraws that are kept")

    def show(self, event: Event) -> None:
        self._has_begun |= isinstance(event, JobStarted | JobDone | JobFailed)
        self._counts.add(event)
        self._view.show(event)
        if self._style.as_json and isinstance(event, JobDone | JobFailed):
            json_line(outcome_to_json(event.outcome))
