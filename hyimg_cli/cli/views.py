"""Views of a running run: a bar on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from threading import Lock
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from hyimg_cli.cli.render import Style, note
from hyimg_cli.cli.sentences import (
    describe_outcome,
    describe_readiness,
    read_text,
    status,
)
from hyimg_cli.cli.weights_read import WeightsRead
from hyimg_cli.engine.run import RunPlanned
from hyimg_cli.spec.events import (
    Event,
    JobEnded,
    JobStarted,
    ModelLoading,
    Progress,
    PromptsReady,
    Readiness,
)
from hyimg_cli.spec.printed import printable

# Seconds between updates without an event, and between plain status lines.
_TICK_S = 0.2
_STATUS_S = 30.0


class View:
    """Prints one line for each failed job, and nothing else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if isinstance(event, JobEnded) and not event.is_done:
            note(describe_outcome(event.outcome))


class PlainView(View):
    """Prints one line for each finished job and model event, and a status line now and then.

    A thread checks a few times a second; status lines are at least half a minute apart.
    """

    def __init__(self, planned: RunPlanned, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the plan of a run; `planned` receives each event before it is shown here."""
        self._clock = clock
        self._told_at = clock()
        self._planned = planned
        self._total = planned.summary.left
        self._lock = Lock()
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._keep_ticking, daemon=True)
        # The model that is loading, and how much of it was read.
        self._loading: tuple[ModelLoading, WeightsRead] | None = None

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._ticker.join()

    def show(self, event: Event) -> None:
        with self._lock:
            embeds = isinstance(event, Progress) and event.phase == "embed"
            if isinstance(event, ModelLoading):
                self._loading = event, WeightsRead(of_children=self._planned.replicas > 1)
            elif not (embeds or isinstance(event, PromptsReady)):
                self._loading = None
            self._show(event)

    def tick(self) -> None:
        """Update the parts that change without an event."""
        with self._lock:
            if self._loading is not None:
                self._loading[1].look()
            self._move()

    @property
    def ended(self) -> int:
        """Number of jobs that are done or failed."""
        return self._total - self._planned.summary.left

    @property
    def loading(self) -> str:
        """The model that is loading and how much of it was read; empty if none is."""
        if self._loading is None:
            return ""
        event, read = self._loading
        count = read_text(read.nbytes, event.nbytes)
        return f"loading {event.model}" + (f": {count}" if count else "")

    def _keep_ticking(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self.tick()

    def _show(self, event: Event) -> None:
        if isinstance(event, Readiness):
            note(describe_readiness(event))
        elif isinstance(event, JobEnded):
            note(f"[{self.ended}/{self._total}] {describe_outcome(event.outcome)}")

    def _move(self) -> None:
        is_over = 0 < self._total == self.ended
        if self._clock() - self._told_at >= _STATUS_S and not is_over:
            self._told_at = self._clock()
            doing = self.loading or f"{self.ended} of {self._total} done"
            note(status(self._planned, doing))


class RichView(PlainView):
    """Shows bars in place of most lines: one for all jobs, and one for each phase with jobs.

    The bar for all jobs shows the rate and the time left.
    """

    def __init__(self, planned: RunPlanned) -> None:
        super().__init__(planned)
        columns: list[str | ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
        ]
        self.bars = Bars(
            *columns, console=Console(stderr=True, highlight=False, emoji=False), transient=True
        )
        self._all = self.bars.add_task("all jobs", total=self._total, count="")
        # Jobs between their start and their end; the one that moved last comes last.
        self._at_work: dict[str, Progress] = {}
        self._of_phase: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self.bars.stop()

    def _show(self, event: Event) -> None:
        if isinstance(event, JobStarted):
            event = Progress(event.custom_id, "start")
        if isinstance(event, JobEnded):
            self._at_work.pop(event.outcome.custom_id, None)
            if not event.is_done or event.outcome.warnings:
                self._print(describe_outcome(event.outcome))
        elif isinstance(event, Progress) and event.custom_id:
            self._at_work.pop(event.custom_id, None)
            self._at_work[event.custom_id] = event
        elif isinstance(event, Readiness):
            self._print(describe_readiness(event))
        self._move()

    def _move(self) -> None:
        """Update every bar; remove the bars of phases without jobs."""
        jobs = self._at_work.values()
        # The fraction of denoise steps that are done, added up over jobs: a number of pictures.
        drawn = sum(at.done / at.total for at in jobs if at.total)
        count = status(self._planned, f"{self.ended}/{self._total}")
        self.bars.update(self._all, completed=self.ended + 0.9 * drawn, count=count)
        # By phase: text, done, total and count of its job; with several jobs, the last to move.
        rows: dict[str, tuple[str, int, int, str]] = {}
        for phase in sorted({at.phase for at in jobs}):
            *others, at = (at for at in jobs if at.phase == phase)
            who = f"{len(others) + 1} jobs" if others else at.custom_id
            text = f"{at.done} tokens" if at.done else ""
            text = f"step {at.done}/{at.total}" if at.total else text
            rows[phase] = f"{phase}: {who}", at.done, at.total, text
        if self._loading is not None:
            event, read = self._loading
            text = read_text(read.nbytes, event.nbytes)
            rows["loading"] = f"loading {event.model}", read.nbytes, event.nbytes, text
        for phase in self._of_phase.keys() - rows.keys():
            self.bars.remove_task(self._of_phase.pop(phase))
        for phase, (what, completed, total, count) in rows.items():
            if phase not in self._of_phase:
                self._of_phase[phase] = self.bars.add_task(phase, total=None, count="")
            self.bars.update(
                self._of_phase[phase],
                description=printable(what),
                completed=completed,
                total=total or None,
                count=count,
            )

    def _print(self, text: str) -> None:
        self.bars.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def view_of(style: Style, planned: RunPlanned) -> View:
    """Return the view to use: bars on a terminal, a line for each finished job elsewhere."""
    if style.is_quiet or style.progress == "none":
        return View()
    # A dumb terminal, as in an editor, cannot show bars.
    has_bars = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    if style.progress == "rich" or (style.progress == "auto" and has_bars):
        return RichView(planned)
    return PlainView(planned)
