"""Pipelines of models that denoise latents: a model, its encodings, and the latents of
unfinished jobs.
"""

import time
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS
from hyimg_cli.errors import JobError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.kept_latents import find_begun
from hyimg_cli.journal.keys import confirm_dtype, key_of, source_digest
from hyimg_cli.kernels.devices import peak_memory_mb, synchronize
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.pipelines.clock import PhaseClock, Shares
from hyimg_cli.pipelines.latent.encodings import Encodings
from hyimg_cli.pipelines.latent.latents_checkpoint import LatentsCheckpoint
from hyimg_cli.pipelines.latent.stages import Done, LatentStages, Model
from hyimg_cli.pipelines.pipeline import OneJob
from hyimg_cli.pipelines.queue import Dropped, JobQueue
from hyimg_cli.pipelines.request import Lost
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.events import Event, JobStarted, Progress
from hyimg_cli.spec.job import Job


class LatentPipeline(LatentStages[Model, OneJob, Done]):
    """Makes what jobs ask for one at a time, one model at a time."""

    # What a job is on its way.
    request_kind: type[Done]

    def __init__(self, config: RunConfig, pictures: str) -> None:
        """`pictures`: what their encoder makes, by kind of the disk cache."""
        super().__init__(config)
        self._is_loaded = self._denoises = False
        texts, is_on = PROMPT_EMBEDDINGS, config.reuse.prompt_cache
        self._encodings = {
            texts: Encodings[Any](config.cache, texts, is_on=is_on),
            pictures: Encodings[Any](config.cache, pictures),
        }
        self._digest_of = cache(source_digest)
        self._denoised: set[tuple[Path, Job]] = set()
        # Of a server's job at work: nothing is shared with those of another one.
        self._scope = ""

    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Every distinct string and picture is encoded before the transformer comes: the encoders,
        often larger than it, never lie beside it. Where every job is denoised already, neither
        comes.
        """
        # A load that was cut short, by a signal or a closed generator, begins again.
        is_new = self.model != model or not self._is_loaded
        if is_new:
            self.release()
        left = self._not_denoised(jobs, folder)
        needs_room = bool(left) and not self._denoises
        with memory_guard(model, left, self._config) if needs_room else nullcontext():
            # The checkpoint, none of its weights in memory yet.
            started = time.perf_counter()
            if is_new:
                choice = replace(self._config.model, model=model)
                self._model = self._open(choice)
                confirm_dtype(choice, self._model.dtype_name)
            resident = self._resident()
            opened_s = time.perf_counter() - started
            # What the encoders make of all jobs' texts and pictures; then they go.
            wanted: dict[Any, str] = {}
            for job in left:
                with suppress(JobError):  # one that will fail encodes nothing
                    wanted |= resident.conditions(job, self._digests(job))
            for kind, encoder in resident.encoders.items():
                own = [one for one, kind_of_it in wanted.items() if kind_of_it == kind]
                yield from self._encodings[kind].ready(encoder, own)
            # The weights that denoise and decode, or the VAE alone.
            if is_new or needs_room:
                started = time.perf_counter()
                self._load(with_transformer=bool(left))
                self._is_loaded, self._denoises = True, bool(left)
                load_s = opened_s + time.perf_counter() - started
                yield self._loaded(load_s, self._config.parallel.ranks)

    def work(
        self, jobs: Sequence[OneJob], folder: JobFolder | None, started: float
    ) -> Iterator[JobStarted | Progress | Done | Lost[OneJob]]:
        shares, synchronized = Shares(), partial(synchronize, [self._resident().device])
        for part in self._parts(jobs):
            self._revive()
            works = []
            for job in part:
                clock, digests = PhaseClock(started, synchronized, shares), self._digests(job)
                work = self.request_kind(job, clock, source_digests=digests, folder=folder)
                if folder is not None:
                    path = folder.latents_for(job.custom_id)
                    every = self._config.output.checkpoint_every
                    key = key_of(job, digests, self._config)
                    work.checkpoint = LatentsCheckpoint(path, key, every, work.warnings)
                works.append(work)
                yield JobStarted(job.custom_id)
            yield from self.make(works)

    def serve(self, queue: JobQueue) -> None:
        """One at a time: there are no tokens, and nothing goes on beside another."""
        while not queue.is_closed:
            for ticket in queue.take(1, wait=True):
                job: Any = ticket.job
                self._scope = ticket.scope
                for encodings in self._encodings.values():
                    encodings.scope = ticket.scope
                with closing(self._way_of(job, ticket.folder, ticket.submitted)) as way:
                    for event in way:
                        if ticket.is_dropped:
                            ticket.tell(Dropped(job.custom_id))
                            break
                        ticket.tell(event)

    def _way_of(
        self, job: OneJob, folder: JobFolder | None, since: float
    ) -> Generator[Event | Done | Lost[OneJob], None, None]:
        """A job from its prompt on."""
        yield from self.use(self._resident().card.model, [job], folder)
        yield from self.work([job], folder, since)

    def forget(self) -> None:
        for encodings in self._encodings.values():
            encodings.clear()
        self._digest_of.cache_clear()
        self._denoised.clear()

    def release(self) -> None:
        super().release()
        self._is_loaded = self._denoises = False

    def cache_counts(self) -> dict[str, dict[str, int]]:
        encoders, runs = self._resident().encoders, dict[str, int]()
        for encoder in encoders.values():
            runs |= encoder.encoder_runs
        counts = {kind.replace("-", "_"): self._encodings[kind].counts() for kind in encoders}
        return counts | {"encoder_runs": runs}

    def peak_memory_mb(self) -> float:
        return peak_memory_mb([self._resident().device])

    @abstractmethod
    def _open(self, choice: ModelChoice) -> Model:
        """Open a checkpoint, none of its weights in memory yet."""

    def _load(self, *, with_transformer: bool) -> None:
        """Load the weights that decode, and those that denoise."""
        self._resident().load_weights(with_transformer=with_transformer)

    def _parts(self, jobs: Sequence[OneJob]) -> Iterable[Sequence[OneJob]]:
        """Jobs that are denoised together: each alone, unless a kind of model takes more."""
        return [[job] for job in jobs]

    def _digests(self, job: OneJob) -> tuple[str, ...]:
        return tuple(map(self._digest_of, job.images))

    def _not_denoised(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> list[OneJob]:
        """Those that need more than their decode: whose last latents neither are kept nor were,
        until they were done.
        """
        if folder is None:
            return list(jobs)
        left = [job for job in jobs if (folder.run, job) not in self._denoised]
        begun = find_begun(folder, left, self._config)
        done = {name for name, one in begun.items() if one.is_denoised}
        self._denoised |= {(folder.run, job) for job in left if job.custom_id in done}
        return [job for job in left if job.custom_id not in done]
