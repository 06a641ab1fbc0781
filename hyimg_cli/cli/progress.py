"""A run while it goes: a bar on a terminal, lines elsewhere, result lines as JSON, the summary."""

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from hyimg_cli.cli.render import Style, json_line, note
from hyimg_cli.cli.sentences import Readiness, advice, finished, ready, summary
from hyimg_cli.cli.underway import PhaseLine, Underway
from hyimg_cli.engine.runner import Summary
from hyimg_cli.errors import Interrupted, StorageError
from hyimg_cli.journal.journal import outcome_to_json
from hyimg_cli.spec.events import Event, JobDone, JobFailed, JobStarted, Outcome

SUMMARY = (
    "done",
    "failed",
    "invalid",
    "skipped",
    "left",
    "load_s",
    "prewarm_s",
    "encode_s",
    "pictures_s",
    "seconds_per_picture",
)


class Report:
    """Shows a run's events in the style asked for, counts them, and closes with a summary.

    A run that an error ended before its first job has nothing to sum up.
    """

    def __init__(
        self, counts: Summary, style: Style, *, place: str, again: str, retry: str
    ) -> None:
        self._counts = counts
        self._style = style
        self._place, self._again, self._retry = place, again, retry
        self._view = _view(style, counts.left)
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

    def show(self, event: Event) -> None:
        self._has_begun |= isinstance(event, JobStarted | JobDone | JobFailed)
        self._counts.add(event)
        self._view.show(event)
        if self._style.as_json and isinstance(event, JobDone | JobFailed):
            json_line(outcome_to_json(event.outcome))


class View:
    """One line for each failed job, and nothing else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if isinstance(event, JobFailed):
            note(finished(event.outcome))


class PlainView(View):
    """One line when a model is on its way, ready or warm, and one for each finished job."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._count = 0

    def show(self, event: Event) -> None:
        if isinstance(event, Readiness):
            note(ready(event))
        elif isinstance(event, JobDone | JobFailed):
            self._count += 1
            note(f"[{self._count}/{self._total}] {finished(event.outcome)}")


class RichView(View):
    """A bar over all jobs with the time that is left, and a line for each phase that has jobs."""

    def __init__(self, total: int) -> None:
        columns: list[str | ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
        ]
        self._progress = Progress(
            *columns, console=Console(stderr=True, highlight=False), transient=True
        )
        self._total = total
        self._finished = 0
        self._underway = Underway()
        self._all = self._progress.add_task("all jobs", total=total, count=f"0/{total}")
        self._of_phase: dict[str, TaskID] = {}

    @property
    def bars(self) -> list[str]:
        """What each bar stands for, from the top."""
        return [task.description for task in self._progress.tasks]

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        self._underway.add(event)
        if isinstance(event, Readiness):
            self._print(ready(event))
        elif isinstance(event, JobDone | JobFailed):
            self._finished += 1
            if event.outcome.status == "failed" or event.outcome.warnings:
                self._print(finished(event.outcome))
        self._draw()

    def _draw(self) -> None:
        """Brings every bar up to date; a phase without jobs has none."""
        completed = self._finished + 0.9 * self._underway.drawn
        count = f"{self._finished}/{self._total}"
        self._progress.update(self._all, completed=completed, count=count)
        lines = {line.at.phase: line for line in self._underway.lines()}
        for phase in self._of_phase.keys() - lines.keys():
            self._progress.remove_task(self._of_phase.pop(phase))
        for line in lines.values():
            self._draw_phase(line)

    def _draw_phase(self, line: PhaseLine) -> None:
        phase = line.at.phase
        if phase not in self._of_phase:
            self._of_phase[phase] = self._progress.add_task(phase, total=None, count="")
        self._progress.update(
            self._of_phase[phase],
            description=f"{phase}: {line.who}",
            completed=line.at.completed,
            total=line.at.total or None,
            count=line.at.count,
        )

    def _print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _view(style: Style, total: int) -> View:
    """The view that fits: Rich on a terminal, a line for each finished job elsewhere."""
    if style.is_quiet or style.progress == "none":
        return View()
    if style.progress == "rich" or (style.progress == "auto" and sys.stderr.isatty()):
        return RichView(total)
    return PlainView(total)
