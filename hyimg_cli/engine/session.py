"""A loaded model at work on a plan: the one place that holds model, tree, sources and folder.

A picture is written, then its line, then `JobDone` leaves the session: a killed run never has a
line without its picture.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from hyimg_cli import __version__
from hyimg_cli.batch.journal import RunFolder
from hyimg_cli.batch.resolved import job_to_json
from hyimg_cli.engine.beside import ReadAhead, WriteBehind
from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.group import Drawn, GroupRun, Lost, Progress
from hyimg_cli.engine.image import EncodeSource, Picture, ReadSource, Studio
from hyimg_cli.engine.keys import key_of, source_digest
from hyimg_cli.engine.memory import batch_size, peak_memory_mb, synchronize
from hyimg_cli.engine.outcomes import Facts, done, failed
from hyimg_cli.engine.prefixes import Prefixes
from hyimg_cli.engine.prewarm import Shape, prewarm
from hyimg_cli.engine.sources import SourceEncoder, Sources, suits_beside
from hyimg_cli.errors import Interrupted, MachineError
from hyimg_cli.kv.buffer import Slice
from hyimg_cli.kv.tree import Host, KVTree
from hyimg_cli.media.images import SourceImage, write_png
from hyimg_cli.media.metadata import PictureFacts, png_text
from hyimg_cli.models import registry
from hyimg_cli.models.protocols import MixedModel
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobDone,
    JobFailed,
    ModelLoaded,
    Outcome,
    OutputFile,
    Prewarmed,
)
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig

_MB = 1_000_000
# After such an error every later call on the device fails too.
_DEVICE_FAULTS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)


@dataclass(frozen=True)
class _Written:
    drawn: Drawn
    output: OutputFile | None


class Session:
    """Runs plans. One model is resident at a time and stays loaded from one plan to the next."""

    def __init__(
        self, config: RunConfig, observed: Callable[[MixedModel], MixedModel] | None = None
    ) -> None:
        """`observed` wraps every model that is loaded: a bench looks through it and decides."""
        self._config = config
        self._observed = observed
        self._folder: RunFolder | None = None
        self._model: MixedModel | None = None
        self._sources = Sources(config.cache)
        self._tree = self._new_tree()
        self._attempts: dict[str, int] = {}
        self._warmed: set[Shape] = set()
        self._batch_size = 1
        self._counted: dict[str, dict[str, int]] = {}
        self._stop_signal: int | None = None
        self._is_over = False

    def request_stop(self, signal_number: int) -> None:
        """Stop after the current token or denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number

    def forget(self) -> None:
        """Drop the prefixes and sources that earlier plans left behind; the model stays loaded."""
        self._sources.clear()
        self._tree.clear()

    def run(self, plan: Plan, folder: RunFolder | None = None) -> Generator[Event, None, None]:
        """Every job of the plan. A job's failure is an event; the session's own is raised.

        Without a `folder` pictures are made and dropped: outcomes name no files.
        """
        started = time.perf_counter()
        self._folder = folder
        lines = folder.results().items() if folder else ()
        self._attempts = {name: int(line.get("attempt", 0)) for name, line in lines}
        self._is_over = False
        for group in plan.groups:
            yield from self._use(group.model)
            self._stop_if_asked()
            self._batch_size = self._fitting(group.jobs)
            yield from self._prewarmed(group.jobs)
            self._stop_if_asked()
            yield GroupStarted(group.model, group.size_class, len(group.jobs))
            for event in self._tried(group.jobs, started):
                yield event
                if isinstance(event, JobFailed) and self._config.failure.fail_fast:
                    self._is_over = True
            if self._is_over:
                return

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            raise Interrupted(signal_number)

    def _use(self, name: str) -> Iterator[ModelLoaded]:
        """Make `name` the resident model."""
        if self._model is not None and self._model.card.model == name:
            return
        self._model = None
        self.forget()
        self._warmed.clear()
        gc.collect()
        started = time.perf_counter()
        model = registry.load(
            replace(self._config.model, model=name),
            is_batch_invariant=self._config.batch.is_invariant,
        )
        self._model = self._observed(model) if self._observed else model
        self._counted = model.memo_counts()
        yield ModelLoaded(
            model=name,
            load_s=time.perf_counter() - started,
            device=self._model.device_name,
            dtype=_precision_said(self._model.dtype_name, self._config.model.quantization),
            parameters=self._model.parameter_count,
        )

    def _new_tree(self) -> KVTree[Slice]:
        batch = self._config.batch
        host = Host(
            batch.prefix_cache_host_mb * _MB,
            spill=Slice.on_host,
            restore=lambda rows: rows.on(self._resident().layer_devices),
        )
        return KVTree(
            batch.prefix_cache_mb * _MB,
            splits_text=not batch.is_invariant,
            host=host if batch.prefix_cache_host_mb else None,
        )

    def _tried(self, jobs: Sequence[ImageJob], started: float) -> Iterator[Event]:
        """A group's events; failures that may pass are tried again behind the others."""
        for retries_left in range(self._config.failure.max_retries, -1, -1):
            again: list[ImageJob] = []
            by_id = {job.custom_id: job for job in jobs}
            for event in self._group(jobs, started):
                if isinstance(event, JobFailed) and _may_pass(event) and retries_left:
                    again.append(by_id[event.outcome.custom_id])
                else:
                    yield event
            if not again:
                return
            jobs = again

    def _prewarmed(self, jobs: Sequence[ImageJob]) -> Iterator[Prewarmed]:
        """Run the group's new shapes; nothing is shared with the jobs that follow."""
        if not self._config.batch.prewarm:
            return
        started = time.perf_counter()
        studio = self._studio(_unread, self._encoder())
        shapes = prewarm(jobs, studio, batch_size=self._batch_size, warmed=self._warmed)
        if shapes:
            yield Prewarmed(shapes, time.perf_counter() - started)

    def _group(self, jobs: Sequence[ImageJob], started: float) -> Iterator[Event]:
        with ThreadPoolExecutor(1) as writer, ExitStack() as pools:
            encoder, reader = _pool(pools), _pool(pools)
            behind: WriteBehind[_Written] = WriteBehind(writer)
            # What is drawn is written and told, whatever stops the run.
            try:
                yield from self._shown(self._group_run(jobs, started, reader, encoder), behind)
            except GeneratorExit:
                list(self._journaled(behind, wait=True))
                raise
            except Exception:
                yield from self._journaled(behind, wait=True)
                raise
            yield from self._journaled(behind, wait=True)

    def _shown(
        self, events: Iterator[Progress | Drawn | Lost], behind: WriteBehind[_Written]
    ) -> Iterator[Event]:
        """Progress as it is; drawn jobs once they are written; cut where a stop was asked for."""
        for event in events:
            match event:
                case Drawn():
                    behind.submit(partial(self._written, event))
                case Lost():
                    yield self._failed(event)
                case _:
                    yield event
            yield from self._journaled(behind, wait=False)
            self._stop_if_asked()
            if self._is_over:
                return

    def _fitting(self, jobs: Sequence[ImageJob]) -> int:
        """How many of a group's jobs may work together; every job's sequence is counted for it."""
        revision = self._config.model.revision
        return batch_size(jobs, self._resident(), self._config.batch, revision)

    def _group_run(
        self,
        jobs: Sequence[ImageJob],
        started: float,
        reader: ThreadPoolExecutor,
        encoder: ThreadPoolExecutor,
    ) -> Iterator[Progress | Drawn | Lost]:
        model = self._resident()
        coming = [path for job in jobs for path in job.images]
        encode, asked = self._encoder(), self._config.batch.encodes_ahead
        is_beside = suits_beside(model) if asked is None else asked
        then = partial(_ahead, encoder, encode, jobs) if is_beside else None
        ahead = ReadAhead(reader, coming, window=2 * self._batch_size, then=then)
        studio = self._studio(ahead.read, encode)
        run = GroupRun(
            jobs,
            studio,
            batch_size=self._batch_size,
            new_clock=lambda: PhaseClock(started, partial(synchronize, model)),
        )
        return run.run()

    def _encoder(self) -> SourceEncoder:
        model = self._resident()
        model_print = registry.fingerprint(model.card.model, self._config.model.revision)
        return self._sources.encoder(model, model_print)

    def _studio(self, read: ReadSource, encode: EncodeSource) -> Studio:
        model = self._resident()
        scope = f"{model.card.model} {model.dtype_name}"
        prefixes = Prefixes(self._tree, scope)
        return Studio(model, self._config.reuse, prefixes, read, encode)

    def _journaled(self, behind: WriteBehind[_Written], *, wait: bool) -> Iterator[JobDone]:
        for written, seconds in behind.finished(wait=wait):
            drawn = written.drawn
            drawn.clock.beside("write", seconds)
            drawn.clock.enter("write")
            key = key_of(drawn.job, drawn.picture.source_digests, self._config)
            outcome = done(
                drawn.job, drawn.picture, written.output, self._facts(drawn.job, drawn.clock, key)
            )
            yield JobDone(self._recorded(outcome))

    def _failed(self, lost: Lost) -> JobFailed:
        if isinstance(lost.error, MachineError):
            raise lost.error
        if isinstance(lost.error, _DEVICE_FAULTS):
            what = f"the GPU failed: {lost.error}".split("\n")[0]
            raise MachineError(what, hint="run the same command again", code="machine.gpu")
        digests = [source_digest(path) for path in lost.job.images]
        key = key_of(lost.job, digests, self._config)
        facts = self._facts(lost.job, lost.clock, key)
        return JobFailed(self._recorded(failed(lost.job, lost.error, facts)))

    def _facts(self, job: ImageJob, clock: PhaseClock, key: str) -> Facts:
        self._attempts[job.custom_id] = self._attempts.get(job.custom_id, 0) + 1
        cache = {"source_images": self._sources.counts(), **self._memo_counts()}
        peak_mb = peak_memory_mb(self._resident())
        return Facts(key, self._attempts[job.custom_id], clock, cache, peak_mb)

    def _memo_counts(self) -> dict[str, dict[str, int]]:
        """The model's own memos, from when this session loaded it."""
        return {
            kind: {name: count - self._counted[kind][name] for name, count in counts.items()}
            for kind, counts in self._resident().memo_counts().items()
        }

    def _recorded(self, outcome: Outcome) -> Outcome:
        if self._folder is not None:
            self._folder.append(outcome)
        return outcome

    def _written(self, drawn: Drawn) -> _Written:
        if self._folder is None:
            return _Written(drawn, None)
        job, picture = drawn.job, drawn.picture
        path = self._folder.path_for(job.custom_id)
        text = self._metadata(job, picture) if self._config.output.metadata else {}
        sha256, pixel_sha256 = write_png(path, picture.pixels, text)
        height, width = picture.pixels.shape[:2]
        relative = path.relative_to(self._folder.folder).as_posix()
        output = OutputFile(relative, sha256, pixel_sha256, width, height, job.seed)
        return _Written(drawn, output)

    def _metadata(self, job: ImageJob, picture: Picture) -> dict[str, str]:
        facts = PictureFacts(
            size=Size(*picture.pixels.shape[:2]),
            model_name=self._resident().card.name,
            model_fingerprint=registry.fingerprint(job.model, self._config.model.revision),
            version=__version__,
            cot_text=picture.written.text,
            cot_token_ids=picture.written.ids,
            ratio_index=picture.bucket.ratio_index,
        )
        return png_text(job, job_to_json(job), facts)

    def _resident(self) -> MixedModel:
        assert self._model is not None, "a model is loaded before its jobs run"
        return self._model


def _pool(pools: ExitStack) -> ThreadPoolExecutor:
    """One thread; what it has not begun when the group ends is not begun any more."""
    pool = ThreadPoolExecutor(1)
    pools.callback(pool.shutdown, cancel_futures=True)
    return pool


def _ahead(
    pool: ThreadPoolExecutor,
    encode: SourceEncoder,
    jobs: Sequence[ImageJob],
    image: SourceImage,
) -> None:
    """Have an image encoded as its job will ask for it; in turn where jobs ask differently."""
    kinds = {job.infer_align_image_size for job in jobs if job.images}
    if len(kinds) == 1:
        pool.submit(encode.ahead, image.stretched() if kinds.pop() else image)


def _unread(path: str) -> tuple[SourceImage, float]:
    raise AssertionError(f"prewarming reads no file, not even {path}")


def _precision_said(dtype: str, quantization: str) -> str:
    return dtype if quantization == "none" else f"{dtype}, experts in {quantization}"


def _may_pass(event: JobFailed) -> bool:
    return event.outcome.error is not None and event.outcome.error.retryable
