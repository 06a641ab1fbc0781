"""A run while it goes: a bar on a terminal, lines elsewhere. Each shows events as they come."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Lock
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from hyimg_cli.cli.render import Style, note
from hyimg_cli.cli.sentences import (
    describe_outcome,
    describe_readiness,
    progress_text,
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

# Between looks at what changes without an event, and between plain lines that say how far it is.
_TICK_S = 0.2
_STATUS_S = 30.0
_LOADING = "loading"


class View:
    """One line for each failed job, and nothing else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if isinstance(event, JobEnded) and not event.is_done:
            note(describe_outcome(event.outcome))


class LiveView(View):
    """One that also moves between events: a thread looks at it a few times a second."""

    def __init__(self, planned: RunPlanned) -> None:
        """`planned` follows the run: it is told events before they are shown here."""
        self._planned = planned
        self._total = planned.summary.left
        self._lock = Lock()
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._keep_ticking, daemon=True)
        self._loading: ModelLoading | None = None
        self._read: WeightsRead | None = None

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
                self._read = WeightsRead(of_children=self._planned.replicas > 1)
                self._loading = event
            elif not (embeds or isinstance(event, PromptsReady)):
                self._loading = self._read = None
            self._show(event)

    def tick(self) -> None:
        """Bring up to date what changes without an event."""
        with self._lock:
            if self._read is not None:
                self._read.look()
            self._move()

    @property
    def ended(self) -> int:
        """How many jobs are done or failed."""
        return self._total - self._planned.summary.left

    @property
    def loading(self) -> str:
        """Which model is on its way and how much of it was read; empty while none is."""
        if self._loading is None or self._read is None:
            return ""
        count = read_text(self._read.nbytes, self._loading.nbytes)
        return f"loading {self._loading.model}" + (f": {count}" if count else "")

    def _show(self, event: Event) -> None:
        raise NotImplementedError

    def _move(self) -> None:
        raise NotImplementedError

    def _keep_ticking(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self.tick()


class PlainView(LiveView):
    """One line when a model is on its way, ready or warm, one for each finished job, and after half
    a minute at most one that says how far the run is.
    """

    def __init__(self, planned: RunPlanned, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(planned)
        self._clock = clock
        self._told_at = clock()

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


class Underway:
    """The jobs between their start and their end, the one that moved last behind the others."""

    def __init__(self) -> None:
        self._jobs: dict[str, Progress] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, JobStarted):
            event = Progress(event.custom_id, "start")
        if isinstance(event, JobEnded):
            self._jobs.pop(event.outcome.custom_id, None)
        elif isinstance(event, Progress) and event.custom_id:
            self._jobs.pop(event.custom_id, None)
            self._jobs[event.custom_id] = event

    def lines(self) -> Iterator[Progress]:
        """The progress of each phase that has jobs: of its job, or of several that moved last."""
        for phase in sorted({at.phase for at in self._jobs.values()}):
            at_work = [at for at in self._jobs.values() if at.phase == phase]
            many = f"{len(at_work)} jobs"
            yield at_work[0] if len(at_work) == 1 else replace(at_work[-1], custom_id=many)

    @property
    def drawn(self) -> float:
        """Denoise steps done by the jobs at work, in pictures."""
        return sum(at.done / at.total for at in self._jobs.values() if at.total)


class RichView(LiveView):
    """A bar over all jobs with the rate and the time that is left, and a line for each phase that
    has jobs.
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
        self._underway = Underway()
        self._all = self.bars.add_task("all jobs", total=self._total, count="")
        self._of_phase: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self.bars.stop()

    def _show(self, event: Event) -> None:
        self._underway.add(event)
        if isinstance(event, Readiness):
            self._print(describe_readiness(event))
        elif isinstance(event, JobEnded) and (not event.is_done or event.outcome.warnings):
            self._print(describe_outcome(event.outcome))
        self._move()

    def _move(self) -> None:
        """Brings every bar up to date; a phase without jobs has none."""
        completed = self.ended + 0.9 * self._underway.drawn
        count = status(self._planned, f"{self.ended}/{self._total}")
        self.bars.update(self._all, completed=completed, count=count)
        lines = {at.phase: at for at in self._underway.lines()}
        for phase in self._of_phase.keys() - {*lines, *([_LOADING] if self._loading else [])}:
            self.bars.remove_task(self._of_phase.pop(phase))
        for at in lines.values():
            what = f"{at.phase}: {at.custom_id}"
            self._draw(at.phase, what, at.done, at.total, progress_text(at))
        if self._loading is not None and self._read is not None:
            read, nbytes = self._read.nbytes, self._loading.nbytes
            what = f"loading {self._loading.model}"
            self._draw(_LOADING, what, read, nbytes, read_text(read, nbytes))

    def _draw(self, phase: str, what: str, completed: int, total: int, count: str) -> None:
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
    """The view that fits: Rich on a terminal, a line for each finished job elsewhere."""
    if style.is_quiet or style.progress == "none":
        return View()
    # A terminal of which nothing is known, as in an editor, shows no bar at all.
    has_bars = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    if style.progress == "rich" or (style.progress == "auto" and has_bars):
        return RichView(planned)
    return PlainView(planned)
