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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hyimg_cli.engine.runner import cards
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.manifest import planner
from hyimg_cli.measure.bench.scenario import EMBED, LOAD, PREWARM, REST, START, Lifetime
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.models import registry
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Context, LivePicture
from hyimg_cli.pipelines.image.pipeline import LoadModel
from hyimg_cli.settings.run import ModelChoice, OutputConfig, RunConfig
from hyimg_cli.spec.events import PHASES, JobEnded, ModelLoaded, Outcome, Prewarmed, PromptsReady
from hyimg_cli.spec.job import ImageJob, Job

WORK = tuple(phase for phase in PHASES if phase != "queue")
RUN_PHASES = (START, LOAD, EMBED, PREWARM, *WORK, REST)
_INTERVAL_S = 0.005
# An interval in which the process was on a core for less than this share of it is idle.
_BUSY_SHARE = 0.1
Texts = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RunResult:
    """One run, of one or several processes one after another. `idle_s`: wall time during which no
    thread had any work, their starts left out. `rows`: token rows that entered the transformer, by
    stage: `prefill` of prompts and prefixes, `text`, `denoise`.
    """

    folder: Path
    wall_s: float
    idle_s: float
    phases_s: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    processes: int = 1
    rows: Mapping[str, int] = field(default_factory=dict)

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
    """Carry out a variant's runs; `texts` decides what is written, `keeps_kv` as in `Variant`.

    Processes load a model of their own and start with nothing warm; starting them counts. A session
    takes its model from `load` and forgets all else before each run; it is closed at the end.
    """
    if lifetime != "session":
        given = {name: tuple(ids) for name, ids in texts.items()}
        start = partial(_alone, config, given, keeps_kv)
        yield partial(_in_processes, start, 1 if lifetime == "process-per-job" else None)
        return
    rows: Counter[str] = Counter()

    def load_forced(choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel:
        model: Any = load(choice, is_batch_invariant=is_batch_invariant)
        model = model if keeps_kv else Uncached(model)
        return cast(DecoderModel, CountedRows(ForcedText(model, texts), rows))

    with Session(config, load_forced) as session:

        def run(jobs: Sequence[Job], folder: Path) -> RunResult:
            session.forget()
            rows.clear()
            return replace(_timed_run(session, config, jobs, folder), rows=dict(rows))

        yield run


def _in_processes(
    start: Run, jobs_each: int | None, jobs: Sequence[Job], folder: Path
) -> RunResult:
    """Run `start` in a new process for all jobs, or for every few, one after another."""
    size = jobs_each or len(jobs)
    parts = [jobs[at : at + size] for at in range(0, len(jobs), size)]
    results = []
    for part in parts:
        started = time.perf_counter()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                result = pool.submit(start, tuple(part), folder).result()
            except BrokenProcessPool:
                what, hint = "a process of the bench died", "check that its model fits into memory"
                raise MachineError(what, hint=hint, code="bench.process") from None
        wall_s = time.perf_counter() - started
        phases_s = {**result.phases_s, START: wall_s - result.wall_s}
        results.append(replace(result, wall_s=wall_s, phases_s=phases_s))
    return RunResult(
        folder,
        sum(one.wall_s for one in results),
        sum(one.idle_s for one in results),
        {phase: sum(one.phases_s[phase] for one in results) for phase in RUN_PHASES},
        tuple(outcome for one in results for outcome in one.outcomes),
        processes=len(results),
        rows=sum((Counter(one.rows) for one in results), Counter()),
    )


def _alone(
    config: RunConfig, texts: Texts, keeps_kv: bool, jobs: Sequence[Job], folder: Path
) -> RunResult:
    """Do the work of such a process."""
    with runs_of("session", config, texts, _load, keeps_kv=keeps_kv) as run:
        return run(jobs, folder)


def shared_models() -> LoadModel:
    """Return a loader that loads each model once for all sessions, of which one works at a time.

    At the real size, loading takes minutes and two copies do not fit.
    """
    return cache(_load)


def _load(choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel:
    """Load as `registry.load` does, if the weights fit."""
    config = RunConfig(output=OutputConfig(Path()), model=choice)
    with memory_guard(choice.model, (), config):
        return registry.load(choice, is_batch_invariant=is_batch_invariant)


def _timed_run(session: Session, config: RunConfig, jobs: Sequence[Job], folder: Path) -> RunResult:
    """Run every job once, in the order of a plan, and write pictures to `folder`."""
    plan = planner.make_plan(jobs, cards(config.model.revision))
    outcomes: list[Outcome] = []
    phases_s = dict.fromkeys(RUN_PHASES, 0.0)
    with RunFolder(folder) as run_folder, IdleWatch() as idle:
        started = time.perf_counter()
        for event in session.run(plan, run_folder):
            match event:
                case ModelLoaded():
                    phases_s[LOAD] += event.load_s
                case PromptsReady():
                    phases_s[EMBED] += event.encode_s
                case Prewarmed():
                    phases_s[PREWARM] += event.prewarm_s
                case JobEnded():
                    outcomes.append(event.outcome)
                case _:
                    pass
        wall_s = time.perf_counter() - started
    for phase in WORK:
        phases_s[phase] += sum(outcome.share_s.get(phase, 0.0) for outcome in outcomes)
    phases_s[REST] = wall_s - sum(phases_s.values())
    return RunResult(folder, wall_s, idle.idle_s, phases_s, tuple(outcomes))


class _Wrapped:
    """A model with some methods replaced; the others are those of the inner model."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class CountedRows(_Wrapped):
    """A model that adds up its transformer rows in `rows`, by stage."""

    _STAGE_OF = {"prefill": "prefill", "prefill_branches": "prefill"}
    _STAGE_OF |= {"feed": "text", "velocities": "denoise"}

    def __init__(self, inner: Any, rows: Counter[str]) -> None:
        super().__init__(inner)
        self._rows = rows

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


class Uncached(_Wrapped):
    """A model that keeps no K/V between denoise steps. Each step computes the whole sequence of
    every branch, as an engine without a cache does; the first one uses what was prefilled for it.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._prefixes: WeakKeyDictionary[Buffer, Any] = WeakKeyDictionary()

    def prefill(self, layout: Any, ids: Any, sources: Any, buffer: Buffer, stop: int) -> Any:
        self._prefixes[buffer] = ids, sources, stop
        return self._inner.prefill(layout, ids, sources, buffer, stop)

    def branch(self, layout: Any, buffer: Buffer) -> Callable[[], Any]:
        """A function that makes the branch of one denoise step."""
        capacity, first = buffer.capacity, [buffer]
        # Nothing, where a branch has no prefix.
        ids, sources, stop = self._prefixes.get(buffer, ((), (), 0))

        def of_one_step() -> Any:
            own = first.pop() if first else self._inner.new_buffer(capacity)
            if own.length < stop:
                self._inner.prefill(layout, ids, sources, own, stop)
            return self._inner.branch(layout, own)

        return of_one_step

    def velocities(self, pictures: Sequence[LivePicture]) -> Any:
        anew = [replace(one, branches=[made() for made in one.branches]) for one in pictures]
        return self._inner.velocities(anew)


class ForcedText(_Wrapped):
    """A model whose text is decided beforehand, so that both variants draw from the same words:
    logits are computed, then all but the decided token's drop.

    `texts` holds, by job, the ids of its text as a result line has them. Where they end, and for a
    job without any, the model writes as it likes. All else is the inner model's.
    """

    def __init__(self, inner: DecoderModel, texts: Texts) -> None:
        super().__init__(inner)
        self._texts = texts
        self._started: dict[int, tuple[Context, Sequence[int], int]] = {}

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

    Waiting for another thread's work is none of it, nor is waiting for a GPU: the driver polls. On
    a machine that is busy with other programs, waiting for a core looks the same as sleeping.
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
