"""One run of one variant: its seconds, by phase, and its pictures.

    wall  start ▸ load ▸ embed ▸ prewarm ▸ [read encode .. write] of each job ▸ unattributed

The segments are disjoint and add up to the wall time. Jobs that work as a batch share their
batch's time in equal parts. Waiting in a queue is not part of the sum.
"""

# Legend: R row, V vocabulary
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hyimg_cli.engine.runner import Summary, cards
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.arena import Arena
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.manifest import planner
from hyimg_cli.measure.bench.scenario import EMBED, LOAD, PREWARM, REST, START, Lifetime
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.models import registry
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Context, DenoiseInput, Prefill
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import PHASES, JobEnded, Outcome
from hyimg_cli.spec.job import ImageJob, Job

WORK = tuple(phase for phase in PHASES if phase != "queue")
RUN_PHASES = (START, LOAD, EMBED, PREWARM, *WORK, REST)
_INTERVAL_S = 0.005
# An interval is idle if the process was on a core for less than this share of it.
_BUSY_SHARE = 0.1
Texts = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RunResult:
    """One run, of one or several processes one after another.

    `idle_s`: wall time during which no thread had any work, without process starts. `rows`: token
    rows that entered the transformer, by stage: `prefill` of prompts and prefixes, `text`,
    `denoise`. `kv_slots`: the most slots for K/V that were held at once; those of a canvas, which
    are in no page, not counted.
    """

    folder: Path
    wall_s: float
    idle_s: float
    phases_s: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    processes: int = 1
    rows: Mapping[str, int] = field(default_factory=dict)
    kv_slots: int = 0

    @property
    def denoise_s(self) -> float:
        return self.phases_s["denoise_first"] + self.phases_s["denoise_rest"]

    @property
    def failures(self) -> list[str]:
        return [f"{one.custom_id}: {one.error.message}" for one in self.outcomes if one.error]


Run = Callable[[Sequence[Job], Path], RunResult]


@contextmanager
def runs_of(
    lifetime: Lifetime, config: RunConfig, texts: Texts, load: LoadModel, *, keeps_kv: bool = True
) -> Iterator[Run]:
    """Carry out a variant's runs; `texts` has the texts to write, `keeps_kv` as in `Variant`.

    Each process loads its own model and starts cold; its start counts. A session takes its model
    from `load` and drops everything else before each run; it is closed at the end.
    """
    if lifetime != "session":
        start = partial(_alone, config, texts, keeps_kv)
        yield partial(_in_processes, start, is_per_job=lifetime == "process-per-job")
        return
    rows: Counter[str] = Counter()
    arenas: list[Arena] = []

    def load_forced(choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel:
        model: Any = load(choice, is_batch_invariant=is_batch_invariant)
        # Models that only denoise latents have none.
        arenas[:] = [arena] if (arena := getattr(model, "arena", None)) else []
        model = model if keeps_kv else Uncached(model)
        return cast(DecoderModel, CountedRows(ForcedText(model, texts), rows))

    with Session(config, load_forced) as session:

        def run(jobs: Sequence[Job], folder: Path) -> RunResult:
            session.forget()
            rows.clear()
            for arena in arenas:
                arena.pages.peak = arena.pages.used
            timed = _timed_run(session, config, jobs, folder)
            slots = max((arena.pages.peak * arena.page for arena in arenas), default=0)
            return replace(timed, rows=dict(rows), kv_slots=slots)

        yield run


def _in_processes(start: Run, jobs: Sequence[Job], folder: Path, *, is_per_job: bool) -> RunResult:
    """Run `start` in a new process for all jobs, or in one for each, one after another."""
    results, started = [], time.perf_counter()
    for part in [(job,) for job in jobs] if is_per_job else [tuple(jobs)]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                results.append(pool.submit(start, part, folder).result())
            except BrokenExecutor:
                what, hint = "a process of the bench died", "check that its model fits into memory"
                raise MachineError(what, hint=hint, code="bench.process") from None
    wall_s = time.perf_counter() - started
    phases_s = {phase: sum(one.phases_s[phase] for one in results) for phase in RUN_PHASES}
    phases_s[START] = wall_s - sum(one.wall_s for one in results)
    return RunResult(
        folder,
        wall_s,
        sum(one.idle_s for one in results),
        phases_s,
        tuple(outcome for one in results for outcome in one.outcomes),
        processes=len(results),
        rows=sum((Counter(one.rows) for one in results), Counter()),
        kv_slots=max(one.kv_slots for one in results),
    )


def _alone(
    config: RunConfig, texts: Texts, keeps_kv: bool, jobs: Sequence[Job], folder: Path
) -> RunResult:
    """Do the work of such a process."""
    with runs_of("session", config, texts, load_model, keeps_kv=keeps_kv) as run:
        return run(jobs, folder)


def load_model(choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel:
    """Load as `registry.load` does, if the weights fit."""
    config = RunConfig(output=OutputConfig(Path()), model=choice)
    with memory_guard(choice.model, (), config):
        return registry.load(choice, is_batch_invariant=is_batch_invariant)


def _timed_run(session: Session, config: RunConfig, jobs: Sequence[Job], folder: Path) -> RunResult:
    """Run every job once, in the order of a plan, and write pictures to `folder`."""
    plan = planner.make_plan(jobs, cards(config.model.revision))
    outcomes, summary = list[Outcome](), Summary()
    with RunFolder(folder) as run_folder, IdleWatch() as idle:
        started = time.perf_counter()
        for event in session.run(plan, run_folder):
            summary.add(event)
            if isinstance(event, JobEnded):
                outcomes.append(event.outcome)
        wall_s = time.perf_counter() - started
    phases_s = dict.fromkeys(RUN_PHASES, 0.0)
    phases_s |= {LOAD: summary.load_s, EMBED: summary.encode_s, PREWARM: summary.prewarm_s}
    phases_s |= {phase: sum(one.share_s.get(phase, 0.0) for one in outcomes) for phase in WORK}
    phases_s[REST] = wall_s - sum(phases_s.values())
    return RunResult(folder, wall_s, idle.idle_s, phases_s, tuple(outcomes))


@dataclass(eq=False)
class _Wrapped:
    """A model with some methods replaced; the inner model has the others."""

    _inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(eq=False)
class CountedRows(_Wrapped):
    """A model that adds up its transformer rows, by stage."""

    _rows: Counter[str]
    _STAGE_OF = {"prefill": "prefill", "prefill_branches": "prefill"}
    _STAGE_OF |= {"feed": "text", "velocities": "denoise"}

    def __getattr__(self, name: str) -> Any:
        found, stage = super().__getattr__(name), self._STAGE_OF.get(name)
        # Models that only denoise latents count no rows.
        if stage is None or not hasattr(self._inner, "rows_seen"):
            return found

        def counted(*arguments: Any) -> Any:
            before = self._inner.rows_seen
            result = found(*arguments)
            self._rows[stage] += self._inner.rows_seen - before
            return result

        return counted


@dataclass(eq=False)
class Uncached(_Wrapped):
    """A model that keeps no K/V between denoise steps.

    Each step computes the whole sequence of every branch, as an engine without a cache does; the
    first step uses its prefill.
    """

    _prefixes: WeakKeyDictionary[Buffer, Any] = field(default_factory=WeakKeyDictionary)

    def prefill(self, prefills: Sequence[Prefill]) -> Any:
        self._prefixes |= {one.buffer: (one.ids, one.sources, one.stop) for one in prefills}
        return self._inner.prefill(prefills)

    def branch(self, layout: Any, buffer: Buffer) -> Callable[[], Any]:
        """Return a function that makes the branch of one denoise step."""
        first = [buffer]
        # Empty if a branch has no prefix.
        ids, sources, stop = self._prefixes.get(buffer, ((), (), 0))

        def of_one_step() -> Any:
            own = first.pop() if first else self._inner.new_buffer()
            if own.length < stop:
                self._inner.prefill([Prefill(layout, ids, sources, own, stop)])
            return self._inner.branch(layout, own)

        return of_one_step

    def velocities(self, pictures: Sequence[DenoiseInput]) -> Any:
        anew = [replace(one, branches=[made() for made in one.branches]) for one in pictures]
        return self._inner.velocities(anew)


@dataclass(eq=False)
class ForcedText(_Wrapped):
    """A model with a given text, so that both variants draw from the same words.

    Logits are computed; then all but the given token's are dropped. `_texts` holds, by job, the ids
    of its text as in a result line. After their end, and for a job without them, the model writes
    freely. Everything else comes from the inner model.
    """

    _texts: Texts
    _started: dict[int, tuple[Context, Sequence[int], int]] = field(default_factory=dict)

    def text_budget(self, job: ImageJob, context: Context) -> int:
        # A text's first ids open it and were fed with the prompt.
        opening = len(self._inner.script(job).opening)
        ids = self._texts.get(job.custom_id, ())[opening:]
        self._started[id(context)] = context, ids, len(context.ids)
        return cast(int, self._inner.text_budget(job, context))

    def text_logits(self, contexts: Sequence[Context]) -> Tensor:
        logits_RV = cast(Tensor, self._inner.text_logits(contexts))
        for row, context in enumerate(contexts):
            _, ids, start = self._started.get(id(context), (context, (), 0))
            # Rows are counted in the buffer: ids that were just chosen may not be known here yet.
            at = (context.buffer.length if context.buffer else 0) - start
            if at < len(ids):
                decided = logits_RV[row, ids[at]].clone()
                logits_RV[row] = -torch.inf
                logits_RV[row, ids[at]] = decided
        return logits_RV


class IdleWatch:
    """Sum of the intervals of a few milliseconds in which no thread of this process had work.

    Waiting for another thread's work does not count, nor does waiting for a GPU, because the driver
    polls. On a machine that is busy with other programs, waiting for a core looks the same as
    sleeping.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        while not self._is_over.wait(_INTERVAL_S):
            wall_now, busy_now = time.perf_counter(), time.process_time()
            if busy_now - busy < _BUSY_SHARE * (wall_now - wall):
                self.idle_s += wall_now - wall
            wall, busy = wall_now, busy_now
