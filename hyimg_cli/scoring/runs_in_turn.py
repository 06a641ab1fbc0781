"""Runs of one request, one after the other: drafts, then what follows from them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyimg_cli.engine.run import AnySession, ManifestRun, OnEvent
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import Job


@dataclass
class RunsInTurn:
    """Ordinary runs for a request, which can be stopped. `summaries`: of those that ended."""

    request: RunRequest
    summaries: list[Summary] = field(default_factory=list, init=False)
    _at_work: ManifestRun | None = field(default=None, init=False)
    _stop_signal: int | None = field(default=None, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    # Opens the runs' sessions, if somebody needs them afterwards.
    _new_session: Callable[[RunConfig], AnySession] | None = field(default=None, init=False)

    def request_stop(self, signal_number: int) -> bool:
        """Stop as `ManifestRun.request_stop` does; what works between runs ends at once."""
        self._stop_signal = signal_number
        return self._at_work is not None and self._at_work.request_stop(signal_number)

    def draw(
        self,
        folder: Path,
        change: Callable[[Sequence[Job]], Sequence[Job]],
        on_event: OnEvent,
    ) -> None:
        """Draw changed jobs into a folder with a run, whose model is released when it ends."""
        config = self.request.config
        config = replace(config, output=replace(config.output, folder=folder))
        request = replace(self.request, config=config, change=change)
        run = self._at_work = ManifestRun(request, self._new_session)
        if self._stop_signal is not None:
            run.request_stop(self._stop_signal)
        self.summaries.append(run.run(on_event, age_s=time.monotonic() - self._began))
        self._at_work = None
