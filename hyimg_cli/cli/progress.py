"""Show a running run: its events, result lines as JSON, and a summary at the end."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli.render import Style, json_line, note, remarks
from hyimg_cli.cli.sentences import summary
from hyimg_cli.cli.views import View, view_of
from hyimg_cli.engine.run import ManifestEvent, ManifestRun, RunEnded, RunPlanned
from hyimg_cli.errors import Interrupted, StorageError
from hyimg_cli.journal.journal import outcome_to_json
from hyimg_cli.pipelines.failures import exit_code
from hyimg_cli.spec.events import JobEnded, JobStarted, Remark


@dataclass
class Report:
    """Shows a run's events in the chosen style, then a summary.

    `again`: the command line that resumes the run; `retry`: the one that retries failed jobs.
    """

    style: Style
    place: str
    again: str
    retry: str
    view: View = field(default_factory=View)
    has_begun: bool = False

    def show(self, event: ManifestEvent) -> None:
        match event:
            case Remark():
                show_remark(event, self.style)
            case RunPlanned():
                self.view, self.has_begun = view_of(self.style, event), False
                self.view.__enter__()
            case RunEnded():
                self._end(event)
            case _:
                self.has_begun |= isinstance(event, JobStarted | JobEnded)
                self.view.show(event)
                if self.style.as_json and isinstance(event, JobEnded):
                    json_line(outcome_to_json(event.outcome))

    def _end(self, end: RunEnded) -> None:
        """Print the summary, except after an error before the first job."""
        self.view.__exit__()
        is_stopped = isinstance(end.error, Interrupted | KeyboardInterrupt)
        if end.error is not None and not is_stopped and not self.has_begun:
            return
        counts = end.summary
        if not self.style.is_quiet:
            note(summary(counts, self.place))
            if counts.failed:
                note(f"to run the failed jobs again: {self.retry}")
            if counts.left:
                note(f"to resume: {self.again}")
        if self.style.as_json:
            try:
                json_line({"summary": counts.to_json(), "output_dir": self.place})
            except (StorageError, BrokenPipeError) as error:  # result lines are written
                note(f"no summary: {error}; see {self.place}/results.jsonl")


def show_remark(remark: Remark, style: Style) -> None:
    """Print a remark on standard error; with -q, only faults."""
    if remark.kind == "note":
        remarks([remark.text], style)
    elif remark.kind == "fault" or not style.is_quiet:
        note(remark.text)


@contextmanager
def stoppable(request_stop: Callable[[int], bool] = lambda _: False) -> Iterator[None]:
    """Handle SIGINT and SIGTERM in a block: the first stops in order, the second at once.

    In order means after the current denoise step, or after the edit that is being finished again.
    Raises Interrupted at the first signal if `request_stop` returns False: there is nothing to
    stop in order. The former handlers are restored at the end.
    """
    asked: list[int] = []

    def handle(signal_number: int, _frame: FrameType | None) -> None:
        if asked:
            os._exit(128 + signal_number)
        asked.append(signal_number)
        if not request_stop(signal_number):
            # NOTE: picture readers catch every Exception, so use one that is not an Exception
            # until the block is left.
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(asked[0] if asked else signal.SIGINT) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def show_run(
    run: ManifestRun, style: Style, *, again: str, retry: str, texts: Path | None = None
) -> int:
    """Run a manifest's jobs, or write their texts to `texts`, and return the exit code.

    It is 1 if a job failed, a line was invalid, or a result failed a gate.
    """
    place = shown_place(texts or run.request.config.output.folder)
    report = Report(style, place, again, retry)
    with stoppable(run.request_stop):
        if texts:
            counts = run.write_texts(texts, report.show)
        else:
            counts = run.run(report.show, age_s=time.process_time())
    return exit_code(counts.failed, counts.invalid, counts.gated)
