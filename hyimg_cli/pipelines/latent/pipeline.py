"""Pipelines of models that only denoise latents: preparation, then each job's stages.

Latents kept by an earlier attempt replace the steps before them. A stage raises JobError for a
fault of its job alone. No state is left after a job: each gets a new denoiser. Jobs are denoised
together only if configured, because this rounds differently. Such jobs are encoded and decoded
alone, and have their own noise and conditions.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import JobError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.kept_latents import find_begun_parts
from hyimg_cli.journal.keys import confirm_dtype, source_digests
from hyimg_cli.kernels.devices import peak_memory_mb, starts_slowly, synchronize
from hyimg_cli.media.images import Digests
from hyimg_cli.memory.fit import memory_guard
from hyimg_cli.models.latent import LatentDenoiser, LatentModel, PromptEmbedding
from hyimg_cli.pipelines.clock import PhaseClock, Shares, compiling_apart
from hyimg_cli.pipelines.latent.encodings import Encodings
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.pipeline import OneJob, Pipeline
from hyimg_cli.pipelines.queue import Dropped, Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.events import Event, JobStarted, Progress
from hyimg_cli.spec.job import Job

Model = TypeVar("Model", bound=LatentModel)
Done = TypeVar("Done", bound="LatentRequest[Any]")
Events = Iterator[Progress | Done | Lost[Any]]


@dataclass(eq=False)
class LatentRequest(Request[OneJob]):
    """A job at work, and the results of its stages.

    `folder`: where its file goes. `input_warnings`: what was cut or left out of its inputs;
    `input_notes`: of the model, and what reading its pictures changed. Both are kept with its
    latents. `embeddings`: of its conditions. `latents`: after its last denoise step. `together`:
    how many jobs were denoised at once.
    """

    folder: JobFolder | None = None
    input_warnings: tuple[str, ...] = ()
    input_notes: tuple[str, ...] = ()
    embeddings: Mapping[Any, PromptEmbedding] = field(default_factory=dict)
    latents: Tensor | None = None
    together: int = 1


class LatentPipeline(Pipeline[Model, OneJob, Done]):
    """Makes the results of jobs one at a time, with one model at a time."""

    # The class of a job at work.
    request_kind: type[Done]

    def __init__(self, config: RunConfig, pictures: str) -> None:
        """`pictures`: kind of disk cache entry for encoded pictures."""
        super().__init__(config)
        self._is_loaded = self._denoises = False
        texts, is_on = PROMPT_EMBEDDINGS, config.reuse.prompt_cache
        self._encodings = {
            texts: Encodings[Any](config.cache, texts, is_on=is_on),
            pictures: Encodings[Any](config.cache, pictures),
        }
        self._digest_of = cache(source_digests)
        self._denoised: set[tuple[Path, Job]] = set()
        # Scope of the server's current job; nothing is shared with jobs of other scopes.
        self._scope = ""

    def use(self, model: str, jobs: Sequence[OneJob], folder: JobFolder | None) -> Iterator[Event]:
        """Encode every distinct string and picture, then load the transformer.

        The encoders are often larger than the transformer, and are never in memory together with
        it. If every job is already denoised, neither is loaded.
        """
        self._digest_of.cache_clear()  # a source may have changed, or come back, since earlier jobs
        # A load that was interrupted by a signal or a closed generator starts again.
        is_new = self.model != model or not self._is_loaded
        if is_new:
            self.release()
        drawings: list[Any] = [part for job in jobs for part in job.parts]
        left = self._not_denoised(drawings, folder)
        needs_room = bool(left) and not self._denoises
        with memory_guard(model, left, self._config) if needs_room else nullcontext():
            # Open the checkpoint, with none of its weights in memory yet.
            started = time.perf_counter()
            if is_new:
                choice = replace(self._config.model, model=model)
                self._model = self._open(choice)
                confirm_dtype(choice, self._model.dtype_name)
            resident = self._resident()
            opened_s = time.perf_counter() - started
            # Encode the texts and pictures of all jobs, then release the encoders.
            wanted: dict[Any, str] = {}
            for job in left:
                with suppress(JobError):  # a job that will fail encodes nothing
                    as_read = [one.picture for one in self._digests(job)]
                    wanted |= resident.conditions(job, as_read)
            for kind, encoder in resident.encoders.items():
                own = [one for one, kind_of_it in wanted.items() if kind_of_it == kind]
                yield from self._encodings[kind].ready(encoder, own)
            # Load the weights that denoise and decode, or the VAE alone.
            if is_new or needs_room:
                started = time.perf_counter()
                self._load(with_transformer=bool(left))
                self._is_loaded, self._denoises = True, bool(left)
                load_s = opened_s + time.perf_counter() - started
                yield self._loaded(load_s, self._config.parallel.ranks)

    def work(self, queue: TicketQueue) -> Iterator[None]:
        """Run jobs one at a time: there are no tokens to interleave, and jobs never overlap.

        Some jobs of a whole queue may be denoised together.
        """
        shares, synchronized = Shares(), partial(synchronize, [self._resident().device])

        def new_clock(since: float) -> PhaseClock:
            return PhaseClock(since, synchronized, shares)

        while tickets := queue.take(sys.maxsize if queue.is_whole else 1, wait=True):
            for part in self._parts(tickets):
                events = self._events(part, new_clock, is_prepared=queue.is_whole)
                left = [*part]
                with closing(events):
                    for ticket, event in events:
                        if ticket.is_dropped:
                            # Jobs of one forward began together, and end together.
                            for one in left:
                                one.tell(Dropped(one.job.custom_id))
                            break
                        if isinstance(event, Request):
                            left.remove(ticket)
                        ticket.tell(event)
                        yield

    def _events(
        self,
        tickets: Sequence[Ticket],
        new_clock: Callable[[float], PhaseClock],
        *,
        is_prepared: bool,
    ) -> Generator[tuple[Ticket, Event | Done | Lost[OneJob]], None, None]:
        """Yield the events of jobs that are denoised together, each with its ticket.

        `is_prepared`: what they need at once was encoded with the rest of their plan.
        """
        first, works = tickets[0], list[Done]()
        self._scope = first.scope
        for encodings in self._encodings.values():
            encodings.scope = first.scope
        jobs: list[Any] = [ticket.job for ticket in tickets]
        if not is_prepared:
            for event in self.use(self._resident().card.model, jobs, first.folder):
                yield first, event
        self._revive()
        by_id = {ticket.job.custom_id: ticket for ticket in tickets}
        for job, ticket in zip(jobs, tickets, strict=True):
            clock, digests = new_clock(ticket.submitted), self._digests(job)
            work = self.request_kind(job, clock, source_digests=digests, folder=ticket.folder)
            work.checkpoint = self.checkpoint_of(work, ticket.folder)
            works.append(work)
            yield ticket, JobStarted(job.custom_id)
        for told in self.make(works):
            name = told.custom_id if isinstance(told, Progress) else told.job.custom_id
            yield by_id[name], told

    def make(self, works: Sequence[Done]) -> Events[Done]:
        """Make the jobs' results, except for finishing the files.

        Jobs without saved latents are denoised together. Failed stages get the remedies in
        `out_of_memory`.
        """
        for work in works:
            yield from self.attempt([work], self.encode)
        left = [work for work in works if work.embeddings]
        begun = [work for work in left if work.checkpoint and work.checkpoint.path.exists()]
        new = [work for work in left if work not in begun]
        for batch in filter(None, [new, *([work] for work in begun)]):
            yield from self.attempt(batch, self.denoise)
        self._resident().unload_networks()  # the steps' ones, if networks take turns
        for work in works:
            if work.latents is not None:
                yield from self.decode_anyhow(work)

    def encode(self, work: Done, *, is_counted: bool = True) -> Events[Done]:
        """Encode every string and picture of the job, usually from memory.

        Latents kept from after the last step make this unnecessary.
        """
        job, model = work.job, self._resident()
        work.clock.enter("read")
        kept = None if work.checkpoint is None else work.checkpoint.found()
        if kept is not None and kept.is_last:
            work.warnings.extend(kept.warnings)
            work.notes.extend(kept.notes)
            counted = VelocityCache(job.step_cache, ())
            counted.restore(kept.state, model.device)
            work.step_cache = counted.report()
            work.latents = kept.latents.to(model.device)
            return
        yield Progress(job.custom_id, "encode")
        work.clock.enter("encode")
        found = {
            one: self._encodings[kind].of(model.encoders[kind], one, is_counted=is_counted)
            for one, kind in model.conditions(job, work.sources_as_read).items()
        }
        # A note on an item without pictures is about its text: it was cut.
        shown = [one for one in found if getattr(one, "images", ())]
        warnings = [note for one in found if one not in shown for note in found[one].notes]
        for made in found.values():
            warnings.extend(made.warnings)
        warnings.extend(model.notes(job))
        work.input_warnings = tuple(dict.fromkeys(warnings))
        of_pictures = (note for one in shown for note in found[one].notes)
        work.input_notes = (*model.own_notes, *of_pictures)
        work.warnings.extend(work.input_warnings)
        work.notes.extend(work.input_notes)
        work.first_step = 0 if kept is None else kept.step
        work.embeddings = found
        work.clock.enter("queue")

    def denoise(self, *works: Done) -> Events[Done]:
        """Denoise one job from its kept latents on, or several new jobs together.

        Latents are read on the host only if they are kept.
        """
        for work in works:
            work.clock.enter("denoise_first")
        is_alone, work = len(works) == 1, works[0]
        denoiser = self.new_denoiser(works)
        for one in works:
            yield Progress(one.job.custom_id, "denoise", 0, denoiser.steps)
        if is_alone and work.checkpoint is not None and (kept := work.checkpoint.found()):
            denoiser.restore(kept.step, kept.latents, kept.state)
        compiles, phase = self._config.model.compile_blocks and is_alone, "denoise_first"
        while not denoiser.is_done:
            with compiling_apart(work.clock, phase, is_on=compiles):
                denoiser.advance()
            phase = "denoise_rest"
            for one, own in zip(works, denoiser.latents.split(1), strict=True):
                said = {"warnings": one.input_warnings, "notes": one.input_notes}
                one.save_latents(denoiser, own, **said)
                one.clock.enter(phase)
                yield Progress(one.job.custom_id, "denoise", denoiser.done, denoiser.steps)
        for one, own in zip(works, denoiser.latents.split(1), strict=True):
            one.latents, one.together = own, len(works)
            one.denoise_steps = denoiser.steps - one.first_step
            one.step_cache = denoiser.velocities.report()
            one.clock.enter("queue")

    def new_denoiser(self, works: Sequence[Done]) -> LatentDenoiser:
        """Return the denoiser of jobs that are denoised together; one job unless overridden."""
        (work,) = works
        return self._resident().denoiser(work.job, work.embeddings)

    @abstractmethod
    def decode(self, work: Done) -> Events[Done]:
        """Decode the last latents, and yield the finished job."""

    def decode_anyhow(self, work: Done) -> Events[Done]:
        """Decode, with the remedies for short memory."""
        yield from self.attempt([work], self.decode)

    def _gains_by_prewarming(self) -> bool:
        return starts_slowly(self._resident().device)

    def drop(self) -> None:
        """Free device memory that no step needs: encoders, and what pictures keep there."""
        for encoder in self._resident().encoders.values():
            encoder.release()

    def attempt(self, works: Sequence[Done], stage: Callable[..., Events[Done]]) -> Events[Done]:
        """Run a stage, with the remedies for failure."""
        memory = MemoryPolicy(self.drop, "the text encoders and the prefixes of pictures")
        return memory.attempt(works, stage, lambda work, error: [work.as_lost(error)])

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
        """Open a checkpoint, with none of its weights in memory yet."""

    def _load(self, *, with_transformer: bool) -> None:
        """Load the weights that decode and, if asked, those that denoise."""
        self._resident().load_weights(with_transformer=with_transformer)

    def _parts(self, tickets: Sequence[Ticket]) -> Iterable[Sequence[Ticket]]:
        """Return groups of jobs to denoise together; each job alone unless overridden."""
        return [[ticket] for ticket in tickets]

    def _digests(self, job: OneJob) -> tuple[Digests, ...]:
        return tuple(map(self._digest_of, job.images))

    def _not_denoised(self, jobs: Sequence[OneJob], folder: JobFolder | None) -> list[OneJob]:
        """Return the jobs that need more than their decode.

        Excludes jobs whose last latents are kept now, or were kept until the job was done.
        """
        if folder is None:
            return list(jobs)
        left = [job for job in jobs if (folder.folder, job) not in self._denoised]
        begun = find_begun_parts(folder, left, self._config)
        done = {job for job, one in begun.items() if one.is_denoised}
        self._denoised |= {(folder.folder, job) for job in done}
        return [job for job in left if job not in done]
