"""The image pipeline: a model, the tree of shared prefixes and encoded source images."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hyimg_cli.errors import JobError
from hyimg_cli.journal.edit_facts import edit_warnings
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import confirm_dtype, confirm_graphs, file_provenance
from hyimg_cli.kernels.devices import peak_memory_mb, starts_slowly, synchronize
from hyimg_cli.kv.returns import Returns
from hyimg_cli.kv.segments import Segment
from hyimg_cli.manifest.planner import size_class_of
from hyimg_cli.manifest.resolved import public_line
from hyimg_cli.manifest.written import Replay
from hyimg_cli.media.images import SourceImage, read_view
from hyimg_cli.media.metadata import job_record
from hyimg_cli.memory.available import available_memory, batch_sizes
from hyimg_cli.memory.fit import memory_guard, spare_bytes
from hyimg_cli.memory.footprint import Together, prefetches_sources, prompt_tokens
from hyimg_cli.models import registry
from hyimg_cli.models.common.model import DecoderModel
from hyimg_cli.models.protocols import Answer
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.image.admission import ONLINE_PLACES, Admission, Served, WholeBatches
from hyimg_cli.pipelines.image.batch import ContinuousBatch
from hyimg_cli.pipelines.image.branches import Prefixes
from hyimg_cli.pipelines.image.prewarm import prewarm
from hyimg_cli.pipelines.image.sources import EncodedSources
from hyimg_cli.pipelines.image.stages import ImageRequest, ImageStages, ReadSource
from hyimg_cli.pipelines.image.think import Texts
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.prefetch import SourcePrefetch
from hyimg_cli.pipelines.prefix_tree import new_prefix_tree
from hyimg_cli.pipelines.queue import Ticket, TicketQueue
from hyimg_cli.pipelines.ranks import ImageRanks
from hyimg_cli.pipelines.request import write_drawn
from hyimg_cli.pipelines.round_trips import RoundTrips
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.events import ModelLoaded, OutputFile, Prewarmed, TextFile
from hyimg_cli.spec.job import ImageJob, View
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)


class LoadModel(Protocol):
    """Loads an image model for a session."""

    def __call__(self, choice: ModelChoice, *, is_batch_invariant: bool) -> DecoderModel: ...


class ImagePipeline(Pipeline[DecoderModel, ImageJob, ImageRequest]):
    """Draws pictures, one model at a time."""

    def __init__(self, config: RunConfig, load: LoadModel | None = None) -> None:
        """`load` loads every model; `registry.load` by default."""
        super().__init__(config)
        self._load = load
        self._sources, self._trips = EncodedSources(config.cache), RoundTrips()
        self.tree = new_prefix_tree(config.batch, lambda rows: rows.to_device())
        self._texts = Texts()
        self._together = Together(1, 1)
        # Limits by size class, found when memory was too small; they are not exceeded again.
        self._limits: dict[str, Together] = {}
        self._size_class = ""
        self._counted: dict[str, dict[str, int]] = {}
        # The plan whose jobs are run, and by model which prefixes they will look up.
        self._plan: Plan | None = None
        self._returns: dict[str, Returns] = {}

    def expect(self, plan: Plan, *, is_known: bool) -> None:
        """Keep prefixes for this plan's jobs alone; `is_known`: from an earlier piece of it."""
        if not (is_known and plan is self._plan):
            self._plan = plan
            self._returns.clear()

    def use(
        self, model: str, jobs: Sequence[ImageJob], folder: JobFolder | None
    ) -> Iterator[ModelLoaded]:
        if self.model == model:
            return
        self.release()
        started = time.perf_counter()
        # The check whether the model fits also measures its jobs' texts, which counts too.
        before = registry.sequences(model, self._config.model.revision).memo_counts()
        cache = self._config.cache if self._config.cache.keeps_weights else None
        choice = replace(self._config.model, model=model, weights_cache=cache)
        load: LoadModel = self._load or registry.load
        if self._config.parallel.picture_ranks > 1:
            self._ranks = ranks = ImageRanks(choice, self._config.parallel, lost=self.tree.clear)
            load = ranks.load
        if choice.offloads_experts:
            room = spare_bytes(jobs, self._config, available_memory(self._config))
            choice = replace(choice, expert_room=room)
        # A `load` that was passed in has reserved its memory already.
        is_handed = load is self._load
        with nullcontext() if is_handed else memory_guard(choice.model, jobs, self._config):
            loaded = load(choice, is_batch_invariant=self._config.batch.is_invariant)
        confirm_dtype(choice, loaded.dtype_name)
        confirm_graphs(choice, self._config.parallel.picture_ranks, loaded.graphs is not None)
        self._model, self._counted = loaded, loaded.memo_counts() | before
        load_s = time.perf_counter() - started
        held = self._config.model.quantization
        experts = "" if held == "none" else f", experts in {held}"
        yield self._loaded(
            load_s, self._config.parallel.picture_ranks, f"{loaded.dtype_name}{experts}"
        )

    def work(self, queue: TicketQueue) -> Iterator[None]:
        model = self._resident()
        self._revive()
        waits, shares = partial(synchronize, model.layer_devices), Shares()

        def new_clock(since: float) -> PhaseClock:
            return PhaseClock(since, waits, shares)

        with ExitStack() as pools:
            admission: Admission
            if queue.is_whole:
                tickets = queue.take()
                read = self._read_ahead(tickets, pools)
                stages = self._stages(read, self._returns_of(model))
                admission = WholeBatches(tickets, stages, new_clock)
            else:
                stages = self._stages(_read_now)
                admission = Served(queue, stages, new_clock, self._config.batch)
            run = ContinuousBatch(admission, self._together)
            try:
                for work, event in run.events():
                    work.ticket.tell(event)
                    yield
            finally:
                if queue.is_whole:
                    self._limit(run.memory.most)

    def write(self, done: ImageRequest, folder: JobFolder) -> Sequence[OutputFile | TextFile]:
        if done.answer is not None:
            done.release_context()
            text = f"{done.answer.text}\n" if done.answer.text else ""
            return (TextFile(*folder.save(done.job, done.job.suffix, text.encode())),)
        if done.pixels is None:
            done.release_context()  # a job that ends with its text
            return ()
        file = write_drawn(
            done,
            folder,
            self._config,
            model_name=self._resident().card.name,
            cot_text=done.text.text,
            cot_token_ids=done.text.ids,
            ratio_index=done.canvas.bucket.token_index,
        )
        return (file,)

    def line_fields(self, done: ImageRequest) -> dict[str, Any]:
        text, job, reuse = done.text, done.job, done.reuse
        if done.answer is not None:
            return self._answer_fields(done, done.answer)
        warnings = [text.cut] if text.cut else []
        if reuse.status == "partial":
            warnings.append(f"KV reuse is partial: {reuse.reason}")
        warnings += edit_warnings(done.edit)
        has_written = text.ids is not None
        keeps_note = done.pixels is None or bool(job.lineage.draft_of)
        return {
            "warnings": warnings,
            "cot_text": text.text if has_written else job.cot_text,
            "cot_token_ids": text.ids if has_written else job.cot_token_ids,
            "cot_from": done.cot_from,
            # For a draft, so that its final job can reuse the text.
            "written": done.cached.note if done.cached and keeps_note else None,
            "confidence": done.cached.confidence if done.cached else None,
            "think_truncated": bool(text.cut),
            "ratio_index": done.canvas.bucket.token_index,
            "kv_reuse": reuse,
            "batch": done.batch,
            "parallel": None if self._ranks is None else self._ranks.report(),
        }

    def _answer_fields(self, done: ImageRequest, answer: Answer) -> dict[str, Any]:
        """Return the line fields of a job that asks for a text; an answer may be none of its
        choices.
        """
        choice = done.choice
        chosen = choice is None or choice.best is not None
        return {
            "answer": answer.text if chosen else None,
            "answer_token_ids": answer.ids if chosen else None,
            "finish": answer.finish if choice is None else None,
            "choices": {text: round(p, 6) for text, p in choice.shares.items()}
            if choice and chosen
            else None,
            "mass": float(f"{choice.mass:.6g}") if choice else None,
            "thought": answer.thought,
            "record": self._record_of(done),
            "cot_from": done.cot_from,
            "confidence": done.cached.confidence if done.cached else None,
            "kv_reuse": done.reuse,
            "batch": done.batch,
            "parallel": None if self._ranks is None else self._ranks.report(),
        }

    def _record_of(self, done: ImageRequest) -> dict[str, Any] | None:
        """Return the record of an answer; None if files are to have none."""
        if not self._config.output.metadata:
            return None
        made_by = file_provenance(done.job, self._config)
        return job_record(public_line(done.job), made_by, done.source_sha256)

    def forget(self) -> None:
        self._sources.clear()
        self._trips.clear()
        self._texts.clear()
        self.tree.clear()

    def release(self) -> None:
        super().release()
        self._limits.clear()

    def cache_counts(self) -> dict[str, dict[str, int]]:
        """Return counts for source images, and for the model's memos since it was loaded."""
        of_model = {
            kind: {name: count - self._counted[kind][name] for name, count in counts.items()}
            for kind, counts in self._resident().memo_counts().items()
        }
        return {"source_images": self._sources.counts(), **of_model}

    def peak_memory_mb(self) -> float:
        return peak_memory_mb(self._resident().layer_devices)

    def _fit(self, jobs: Sequence[ImageJob]) -> None:
        """Count every job's sequence to find how many fit together."""
        model, held, config = self._resident(), self.tree.held_bytes, self._config
        model.arena.shrink()
        if self._serves:
            most = config.batch.max_size + ONLINE_PLACES
            config = replace(config, batch=replace(config.batch, max_size=most))
        fitting = batch_sizes(jobs, model, config, held_prefixes=held, joins=self._serves)
        self._size_class = size_class_of(jobs[0], model.card)
        known = self._limits.get(self._size_class, fitting)
        self._together = Together(*map(min, fitting, known))

    def _limit(self, most: Together) -> None:
        """Limit the jobs that think or draw together to the number that fitted into memory.

        The limit applies to the rest of this group and to later groups of its size.
        """
        if most != self._together:
            self._together = self._limits[self._size_class] = most
            logger.warning("memory is too small for more: %d think and %d draw together", *most)

    def _gains_by_prewarming(self) -> bool:
        # Nobody waits for a server before its first request.
        return self._serves or starts_slowly(self._resident().layer_devices[0])

    def _prewarm(self, jobs: Sequence[ImageJob], folder: JobFolder | None) -> Prewarmed:
        stages = self._stages(_read_now)
        # Before the shapes: the stand-ins and the jobs use the memory that is left.
        graphs = stages.model.graphs
        rows = min(self._together.thinking, sum(job.writes_text for job in jobs))
        captured = graphs.prepare(rows) if graphs else 0
        shapes = prewarm(
            jobs,
            stages,
            together=self._together,
            warmed=self._warmed,
            tokens_of=partial(prompt_tokens, revision=self._config.model.revision),
            learn=self._limit,
            lost=self._tell_lost,
        )
        lengths = {shape.tokens for shape in shapes if shape.tokens}
        return Prewarmed(len(shapes), 0.0, captured, tokens=tuple(sorted(lengths)))

    def _returns_of(self, model: DecoderModel) -> Returns | None:
        """Return which prefixes the plan's jobs that are left will look up; None without a plan."""
        name, plan = model.card.model, self._plan
        if plan is None or not self._config.batch.prefix_cache_mb:
            return None
        if name not in self._returns:
            self._returns[name] = Returns(
                [part for job in plan.jobs_of_model(name) for part in job.parts],
                partial(_prefixes_of, model),
                splits_text=not self._config.batch.is_invariant,
            )
        return self._returns[name]

    def _read_ahead(self, tickets: Sequence[Ticket], pools: ExitStack) -> ReadSource:
        """Return a reader of the jobs' sources that reads and encodes the next ones meanwhile."""
        jobs: list[Any] = [ticket.job for ticket in tickets]
        encoder, reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for pool in (encoder, reader):
            # Cancel work that has not begun when the group ends.
            pools.callback(pool.shutdown, cancel_futures=True)
        kinds = {job.infer_align_image_size for job in jobs if job.images}

        def encode_ahead(image: SourceImage) -> None:
            shown = image.stretched() if kinds == {True} else image
            encoder.submit(self._sources.prefetch, shown)

        # Images are encoded ahead only if all jobs need them in the same form.
        is_ahead = len(kinds) == 1 and prefetches_sources(self._config)
        source_images = SourcePrefetch(
            reader,
            deque(view for job in jobs for view in job.views),
            window=2 * self._together.thinking,
            then=encode_ahead if is_ahead else None,
        )
        return source_images.read

    def _stages(self, read: ReadSource, returns: Returns | None = None) -> ImageStages:
        model = self._resident()
        model_print = registry.fingerprint(model.card.model, self._config.model.revision)
        self._sources.use(model, model_print)
        return ImageStages(
            model,
            self._config.reuse,
            Prefixes(self.tree, f"{model.card.model} {model.dtype_name}", returns),
            read,
            self._sources.encode,
            texts=self._texts,
            draws=not self._config.output.only_texts,
            trips=self._trips,
            checkpoint_of=lambda work: self.checkpoint_of(work, work.ticket.folder),
        )


def _prefixes_of(model: DecoderModel, job: ImageJob) -> list[list[Segment]]:
    """Return the sequences that a job will look up; none if it will fail."""
    replay = Replay.of(job)
    try:
        prefixes: list[list[Segment]] = model.prompter.prefixes(replay.job if replay else job)
    except JobError:
        return []
    return prefixes


def _read_now(view: View) -> tuple[SourceImage, float]:
    return read_view(view), 0.0
