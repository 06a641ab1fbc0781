"""Everything the command prints. Progress and messages go to stderr, data to stdout."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from hyimg_cli.cli.underway import PhaseLine, Underway
from hyimg_cli.engine.runner import Summary, work_s
from hyimg_cli.errors import HyimgError, Interrupted, ManifestError, StorageError, UsageError
from hyimg_cli.journal.journal import outcome_to_json
from hyimg_cli.spec.events import (
    Event,
    JobDone,
    JobFailed,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Outcome,
    Prewarmed,
    PromptsReady,
    ReplicaDied,
)

PROGRESS = ("auto", "rich", "plain", "none")
# Of one fault that many lines have, so many are named.
PLACES = 10
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


def line(text: str) -> None:
    """One line of data, on stdout.

    Raises StorageError where it cannot be written; a reader that closed its pipe is typer's.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output cannot be written: {error.strerror}") from error


def note(text: str) -> None:
    """One line for the reader, on stderr. A reader who is gone, or a full log, ends no run."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` of a stranger on one line: what would steer a terminal is written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def remarks(texts: Iterable[str], style: "Style") -> None:
    """What the reader should know, unless only errors are wanted."""
    for text in texts:
        if not style.is_quiet:
            note(f"note: {text}")


def json_line(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of stdout."""
    line(json.dumps(value, ensure_ascii=False))


def table(content: Table) -> None:
    """A table on stdout, never narrower than what it says: no number is cut."""
    console = Console(highlight=False)
    wide = console.options.update(width=10_000)
    console.width = max(console.width, Measurement.get(console, wide, content).maximum)
    console.print(content)


def error(fault: HyimgError) -> None:
    """An error as `error[code]: what / --> where / hint: …`; of several faults, each."""
    if isinstance(fault, ManifestError):
        errors(fault.faults)
    _error(fault, (fault.where,))


def errors(faults: Iterable[HyimgError]) -> None:
    """Each fault, in order; one that many lines have is told once, with the first of its places."""
    places: dict[tuple[str, str, str], list[HyimgError]] = {}
    for fault in faults:
        places.setdefault((fault.code, fault.what, fault.hint), []).append(fault)
    for same in places.values():
        _error(same[0], [one.where for one in same])


def _error(fault: HyimgError, places: Sequence[str]) -> None:
    text = Text(f"error[{fault.code}]", style="bold red") + Text(f": {fault.what}", style="default")
    _stderr().print(text, soft_wrap=True)
    for place in filter(None, places[:PLACES]):
        note(f"  --> {place}")
    if len(places) > PLACES:
        rest = len(places) - PLACES
        note(f"  --> and {rest} more; hyimg check --json names every one")
    if fault.hint:
        note(f"  hint: {fault.hint}")


def fault_as_json(fault: HyimgError) -> dict[str, str]:
    """An error's parts by name."""
    return {"code": fault.code, "message": fault.what, "where": fault.where, "hint": fault.hint}


def internal_error(trace: str) -> None:
    """A mistake of ours: the traceback, and what to do with it."""
    note(trace.rstrip())
    note("error[internal]: this is a mistake in hyimg, not in what you asked for")
    note("  hint: report it with the lines above; finished pictures are kept")


def log_to_stderr(verbosity: int) -> None:
    """Log records of hyimg and the libraries: warnings, with -v infos, with -vv everything."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@dataclass(frozen=True)
class Style:
    """How a command shows its work."""

    progress: str
    is_quiet: bool
    as_json: bool


def style_of(given: Mapping[str, Any]) -> Style:
    """The style that a command line asks for. Raises UsageError for one that does not exist."""
    if given["progress"] not in PROGRESS:
        hint = f"allowed: {', '.join(PROGRESS)}"
        raise UsageError(f"--progress {given['progress']!r} is not known", hint=hint)
    return Style(given["progress"], given["quiet"], given["as_json"])


class View(Protocol):
    """What follows a run while it goes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None: ...


@dataclass(frozen=True)
class After:
    """Where the results are, and the commands that go on: with what is left, with what failed."""

    place: str
    again: str
    retry: str


class Report:
    """Shows a run's events in the style asked for, counts them, and closes with a summary.

    A run that an error ended before its first job has nothing to sum up.
    """

    def __init__(self, counts: Summary, style: Style, after: After) -> None:
        self._counts = counts
        self._style = style
        self._after = after
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
            note(_summary(self._counts, self._after.place))
            for advice in _advice(self._counts, self._after):
                note(advice)
        if self._style.as_json:
            try:
                json_line({"summary": _as_json(self._counts), "output_dir": self._after.place})
            except (StorageError, BrokenPipeError) as error:  # the jobs have their lines
                note(f"no summary: {error}; {self._after.place}/results.jsonl says what was done")

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Shows outcomes that no session made: the failures of lines that are no jobs."""
        for outcome in outcomes:
            note(_finished(outcome))
            if self._style.as_json:
                json_line(outcome_to_json(outcome))

    def show(self, event: Event) -> None:
        self._has_begun |= isinstance(event, JobStarted | JobDone | JobFailed)
        self._counts.add(event)
        self._view.show(event)
        if self._style.as_json and isinstance(event, JobDone | JobFailed):
            json_line(outcome_to_json(event.outcome))


def _summary(counts: Summary, place: str) -> str:
    """Counts, times, and where the pictures are."""
    parts = [f"{counts.done} done", f"{counts.failed} failed", f"{counts.skipped} skipped"]
    parts += [f"{counts.invalid} invalid"] if counts.invalid else []
    parts += [f"{counts.left} left"] if counts.left else []
    parts += [f"model loaded in {counts.load_s:.2f} s"] if counts.load_s else []
    parts += [f"prewarmed in {counts.prewarm_s:.2f} s"] if counts.prewarm_s else []
    parts += [f"prompts embedded in {counts.encode_s:.2f} s"] if counts.encode_s else []
    rate = counts.seconds_per_picture
    parts += [f"{rate:.2f} s per {counts.noun}"] if rate is not None else []
    return f"{', '.join(parts)}; results in {place}"


def _advice(counts: Summary, after: After) -> Iterator[str]:
    """The commands that go on."""
    if counts.failed:
        yield f"run the failed jobs again with: {after.retry}"
    if counts.left:
        yield f"resume with: {after.again}"


def _as_json(counts: Summary) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in SUMMARY}


def _view(style: Style, total: int) -> View:
    """The view that fits: Rich on a terminal, a line for each finished job elsewhere."""
    if style.is_quiet or style.progress == "none":
        return FailureView()
    if style.progress == "rich" or (style.progress == "auto" and sys.stderr.isatty()):
        return RichView(total)
    return PlainView(total)


Readiness: TypeAlias = (
    ModelLoading | ModelLoaded | ModelReleased | Prewarmed | PromptsReady | ReplicaDied
)


class FailureView:
    """One line for each failed job, and nothing else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if isinstance(event, JobFailed):
            note(_finished(event.outcome))


class PlainView(FailureView):
    """One line when a model is on its way, ready or warm, and one for each finished job."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._count = 0

    def show(self, event: Event) -> None:
        if isinstance(event, Readiness):
            note(_ready(event))
        elif isinstance(event, JobDone | JobFailed):
            self._count += 1
            note(f"[{self._count}/{self._total}] {_finished(event.outcome)}")


class RichView:
    """A bar over all jobs with the time that is left, and a line for each phase that has jobs."""

    def __init__(self, total: int) -> None:
        columns: list[str | ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
        ]
        self._progress = Progress(*columns, console=_stderr(), transient=True)
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
            self._print(_ready(event))
        elif isinstance(event, JobDone | JobFailed):
            self._finished += 1
            if event.outcome.status == "failed" or event.outcome.warnings:
                self._print(_finished(event.outcome))
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


def _ready(event: Readiness) -> str:
    """What a session, or one of several replicas, has to say beside its jobs."""
    who = "" if event.replica is None else f"replica {event.replica}: "
    return who + _readiness(event)


def _readiness(event: Readiness) -> str:
    match event:
        case ModelLoading():
            return f"loading {event.model}"
        case ReplicaDied():
            again = "a new one starts in its place" if event.starts_again else "it is given up"
            return f"died ({event.why}), jobs it was at: {event.jobs}; {again}"
        case Prewarmed():
            graphs = f" and {event.graphs} CUDA graphs" if event.graphs else ""
            shapes = f"{event.shapes} shape{'' if event.shapes == 1 else 's'}"
            return f"prewarmed {shapes}{graphs} in {event.prewarm_s:.2f} s"
        case PromptsReady():
            made = f"{event.encoded} of {event.strings} distinct prompts embedded"
            kept = ", the others were kept" if event.encoded < event.strings else ""
            return f"{made} in {event.encode_s:.2f} s{kept}"
        case ModelReleased():
            needed, free = event.needed_bytes / 1e9, event.free_bytes / 1e9
            return f"{event.model} released: the next takes {needed:.1f} GB, {free:.1f} were free"
    size = f"{event.parameters / 1e6:.1f} M parameters, {event.dtype} on {event.device}"
    ranks = f", {event.ranks} ranks" if event.ranks > 1 else ""
    beside = f", beside {', '.join(event.beside)}" if event.beside else ""
    return f"{event.model}: {size}{ranks}, loaded in {event.load_s:.2f} s{beside}"


def _finished(outcome: Outcome) -> str:
    """A finished job on one line."""
    if outcome.error is not None:
        hint = f" ({outcome.error.hint})" if outcome.error.hint else ""
        text = f"{outcome.custom_id}: failed[{outcome.error.code}]: {outcome.error.message}{hint}"
    else:
        paths = ", ".join(file.path for file in outcome.outputs)
        reuse = f", KV reuse {outcome.kv_reuse.status}" if outcome.kv_reuse else ""
        took = f"{work_s(outcome):.2f} s, {outcome.denoise_steps} steps"
        text = f"{outcome.custom_id}: {paths} in {took}{reuse}"
    return " ".join("; ".join((text, *outcome.warnings)).splitlines())


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
