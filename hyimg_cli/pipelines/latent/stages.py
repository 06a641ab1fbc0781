"""Encode and denoise, the first stages of a job whose model only denoises latents. Latents kept by
an earlier attempt replace the steps before them.

A stage raises JobError for a fault of its job alone. No state is left after a job: each gets a new
denoiser. Jobs that are denoised together (only if asked for, because it rounds differently) are
encoded and decoded alone, with their own noise and conditions.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.journal.job_pictures import LATENTS_ARE_KEPT
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.models.latent import LatentDenoiser, LatentModel, PromptEmbedding
from hyimg_cli.pipelines.clock import compiling_apart
from hyimg_cli.pipelines.latent.encodings import Encodings
from hyimg_cli.pipelines.latent.latents_checkpoint import Kept, LatentsCheckpoint
from hyimg_cli.pipelines.out_of_memory import MemoryPolicy
from hyimg_cli.pipelines.pipeline import OneJob, Pipeline
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.spec.events import Progress

Model = TypeVar("Model", bound=LatentModel)
Done = TypeVar("Done", bound="LatentRequest[Any]")
Events = Iterator[Progress | Done | Lost[Any]]


@dataclass(eq=False)
class LatentRequest(Request[OneJob]):
    """A job on its way, and what its stages have made of it.

    `folder`: where its file goes; `checkpoint`: the place for its latents. `input_warnings` of what
    was cut or left out of its inputs, and `input_notes` of what reading its pictures changed, are
    kept with its latents. `embeddings` of its conditions. `latents`: those behind its last denoise
    step. `denoise_steps` are those of this run, which began at `first_step`; `step_cache` counts
    those of all its attempts. `together`: how many jobs were denoised at once.
    """

    folder: JobFolder | None = None
    checkpoint: LatentsCheckpoint | None = None
    input_warnings: tuple[str, ...] = ()
    input_notes: tuple[str, ...] = ()
    embeddings: Mapping[Any, PromptEmbedding] = field(default_factory=dict)
    latents: Tensor | None = None
    first_step: int = 0
    together: int = 1


class LatentStages(Pipeline[Model, OneJob, Done]):
    """The stages of a loaded model's jobs. `_encodings` keep what was encoded, by kind."""

    _encodings: Mapping[str, Encodings[Any]]

    def make(self, works: Sequence[Done]) -> Events[Done]:
        """Make what the jobs ask for but for the end of their files, those that have no step behind
        them denoised together; each stage is tried as `out_of_memory` says.
        """
        for work in works:
            yield from self.attempt([work], self.encode)
        left = [work for work in works if work.embeddings]
        begun = [work for work in left if work.checkpoint and work.checkpoint.path.exists()]
        new = [work for work in left if work not in begun]
        for batch in filter(None, [new, *([work] for work in begun)]):
            yield from self.attempt(batch, self.denoise)
        for work in works:
            if work.checkpoint is not None and work.checkpoint.holds_last:
                work.warnings_if_lost.append(LATENTS_ARE_KEPT)
            if work.latents is not None:
                yield from self.decode_anyhow(work)

    def encode(self, work: Done, *, is_counted: bool = True) -> Events[Done]:
        """Encode every string and picture the job reads; mostly it is in memory. Latents that are
        kept from behind its last step need none of it.
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
            for one, kind in model.conditions(job, work.source_digests).items()
        }
        # A note on what reads no picture: its text was cut.
        shown = [one for one in found if getattr(one, "images", ())]
        warnings = [note for one in found if one not in shown for note in found[one].notes]
        for made in found.values():
            warnings.extend(made.warnings)
        warnings.extend(model.notes(job))
        work.input_warnings = tuple(dict.fromkeys(warnings))
        work.input_notes = tuple(note for one in shown for note in found[one].notes)
        work.warnings.extend(work.input_warnings)
        work.notes.extend(work.input_notes)
        work.first_step = 0 if kept is None else kept.step
        work.embeddings = found
        work.clock.enter("queue")

    def denoise(self, *works: Done) -> Events[Done]:
        """Every denoise step of one job, behind its kept latents, or of several new ones together;
        none is read on the host unless it is kept.
        """
        for work in works:
            work.clock.enter("denoise_first")
        is_alone, work = len(works) == 1, works[0]
        denoiser, kept = self.new_denoiser(works), None
        for one in works:
            yield Progress(one.job.custom_id, "denoise", 0, denoiser.steps)
        if is_alone and work.checkpoint is not None:
            kept = work.checkpoint.found()
        if kept is None:
            first, latents = 0, denoiser.initial_latents()
        else:
            denoiser.restore(kept.step, kept.state)
            first, latents = kept.step, kept.latents.to(self._resident().device)
        steps, compiles = denoiser.steps, self._config.model.compile_blocks and is_alone
        for index in range(first, steps):
            phase, step = "denoise_first" if index == first else "denoise_rest", index + 1
            with compiling_apart(work.clock, phase, is_on=compiles):
                latents = denoiser.step(index, latents)
            for one, own in zip(works, latents.split(1), strict=True):
                if index == first:
                    one.clock.enter("denoise_rest")
                place = one.checkpoint
                if place is not None and (place.is_due(step, steps) or denoiser.is_stop(step)):
                    one.clock.enter("write")
                    memory = denoiser if step < steps else denoiser.velocities
                    state = memory.state() if is_alone else {}
                    said = (one.input_warnings, one.input_notes)
                    place.keep(Kept(step, steps, own, state, *said))
                    one.clock.enter("denoise_rest")
                yield Progress(one.job.custom_id, "denoise", step, steps)
        for one, own in zip(works, latents.split(1), strict=True):
            one.latents, one.together = own, len(works)
            one.denoise_steps = steps - one.first_step
            one.step_cache = denoiser.velocities.report() if is_alone else None
            one.clock.enter("queue")

    def new_denoiser(self, works: Sequence[Done]) -> LatentDenoiser:
        """Of jobs that are denoised together: one, unless a kind of model takes more."""
        (work,) = works
        return self._resident().denoiser(work.job, work.embeddings)

    @abstractmethod
    def decode(self, work: Done) -> Events[Done]:
        """Decode the last latents: then the job is done, and yielded."""

    def decode_anyhow(self, work: Done) -> Events[Done]:
        """The decode, and what is tried where memory is short."""
        yield from self.attempt([work], self.decode)

    def drop(self) -> None:
        """Free what is on the device and no step needs: encoders, and what pictures keep there."""
        for encoder in self._resident().encoders.values():
            encoder.release()

    def attempt(self, works: Sequence[Done], stage: Callable[..., Events[Done]]) -> Events[Done]:
        """A stage, and what is tried where it fails."""
        memory = MemoryPolicy(self.drop, "the text encoders and the prefixes of pictures")
        return memory.attempt(works, stage, lambda work, error: [work.as_lost(error)])
