"""Pipelines at work on a plan: the one place that holds models, plan and folder.

A file is written, then its line, then `JobEnded` leaves the session: a killed run never has a line
without its file.
"""

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.engine.failures import FailureLimit, failed_job
from hyimg_cli.errors import Interrupted, MachineError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import finishing_key, key_of, source_digest
from hyimg_cli.memory.available import available_memory, limit_gpu_memory
from hyimg_cli.memory.fit import fits, need_of_second
from hyimg_cli.memory.refusals import refuse_conflicts
from hyimg_cli.models import registry
from hyimg_cli.pipelines.image.pipeline import ImagePipeline, LoadModel
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.request import Facts, Lost, Request, line_facts
from hyimg_cli.pipelines.torch_settings import torch_settings
from hyimg_cli.pipelines.video.pipeline import VideoPipeline
from hyimg_cli.remote import keep_copies_in
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobEnded,
    ModelLoaded,
    ModelLoading,
    ModelReleased,
    Outcome,
    OutputFile,
)
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Group, Plan, VideoGroup

AnyPipeline = Pipeline[Any, Any, Any]
# A finished job, and its file or why it has none; None where there is no folder.
Written = tuple[Request[Job], OutputFile | Exception | None]


class Session:
    """Runs plans. A model stays loaded from one plan to the next, a second one only beside it where
    both fit.
    """

    def __init__(self, config: RunConfig, load: LoadModel | None = None) -> None:
        """`load` is asked for every image model, by default `registry.load`: a bench shares models
        between sessions, looks through them and decides.
        """
        keep_copies_in(DiskStore(config.cache.folder, config.cache.budget_bytes))
        self._config = config
        self._folder: JobFolder | None = None
        self._images = ImagePipeline(config, load)
        self._edits = EditPipeline(config)
        self._videos = VideoPipeline(config, self._images.forget)
        self._pipelines: tuple[AnyPipeline, ...] = (self._images, self._edits, self._videos)
        self._pipeline: AnyPipeline = self._images
        self._attempts = Counter[str]()
        self._limit = FailureLimit(config.failure)
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Stop after the current token or denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number

    def close(self) -> None:
        """Let the models go, and end the processes that work with them; `run` loads anew."""
        for pipeline in self._pipelines:
            pipeline.release()
        limit_gpu_memory(self._config, is_over=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Drop what earlier plans left in memory for later ones; the models stay loaded."""
        for pipeline in self._pipelines:
            pipeline.forget()

    def run(
        self, plan: Plan, folder: JobFolder | None = None, *, whole: Plan | None = None
    ) -> Generator[Event, None, None]:
        """Every job of the plan. A job's failure is an event; the session's own is raised, and so
        is ConsecutiveErrors behind the last event of a run that jobs' failures ended.

        Without a `folder` pixels are made and dropped: outcomes name no files. `whole`: the plan
        that `plan` is a piece of; what all of its jobs need at once is made ready with the model.
        """
        refuse_conflicts(plan.jobs, self._config)
        limit_gpu_memory(self._config)
        self._folder = folder
        self._attempts = folder.attempts.copy() if folder else Counter()
        if folder:
            folder.make_places(plan.jobs)
        self._limit = FailureLimit(self._config.failure)
        for group in plan.groups:
            with torch_settings(self._config.model, draws=isinstance(group, Group)):
                for event in self._prepare_group(group, whole or plan):
                    yield event
                    self._stop_if_asked()
                self._stop_if_asked()
                yield GroupStarted(group.model, group.size_class)
                # Of no job's time: loading, and what was made ready for other groups.
                yield from self._run_group(group.jobs, plan, time.perf_counter())
            if self._limit.is_over:
                self._limit.raise_fault()
                return

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            raise Interrupted(signal_number)

    def _prepare_group(self, group: Group | VideoGroup, plan: Plan) -> Iterator[Event]:
        """The group's pipeline with its model, its shared work and its shapes behind it."""
        choice = self._config.model
        if isinstance(group, Group):
            card = registry.model_card(group.model, choice.revision)
            self._pipeline = self._edits if card.denoises_latents else self._images
            nbytes = card.weight_bytes
        else:
            self._pipeline = self._videos
            films = registry.video_card(group.model, choice.revision, choice.components)
            nbytes = films.weight_bytes
        pipeline: AnyPipeline = self._pipeline
        others = [one for one in self._pipelines if one is not pipeline]
        if pipeline.model != group.model:
            for other in others:
                if (name := other.model) is None:
                    continue
                # Another model stays where the group's fits beside it with a full batch.
                needed = need_of_second(group.model, group.jobs, self._config)
                there = available_memory(self._config)
                if not fits(needed, there):
                    other.release()
                    yield ModelReleased(name, needed.total, there.free)
            yield ModelLoading(group.model, nbytes)
        beside = tuple(one.model for one in others if one.model is not None)
        for event in pipeline.use(group.model, plan.jobs_of_model(group.model), self._folder):
            yield replace(event, beside=beside) if isinstance(event, ModelLoaded) else event
        yield from pipeline.prepare(group.jobs, self._folder)

    def _run_group(self, jobs: Sequence[Job], plan: Plan, started: float) -> Iterator[Event]:
        """A group's events; failures that may pass are tried again behind the others."""
        again: dict[str, JobEnded] = {}
        for retries_left in range(self._config.failure.max_retries, -1, -1):
            for event in self._work_on(jobs, started):
                is_final = True
                if isinstance(event, JobEnded):
                    again.pop(event.outcome.custom_id, None)
                    error = event.outcome.error
                    if error is not None and error.retryable and retries_left > 0:
                        is_final, again[event.outcome.custom_id] = False, event
                self._limit.add(event, is_final=is_final)
                if is_final:
                    yield event
            if self._limit.is_over or not again:
                break
            jobs = [plan.by_id[name] for name in again]
        yield from again.values()  # of a run that is over

    def _work_on(self, jobs: Sequence[Job], started: float) -> Iterator[Event]:
        """Progress as it is; jobs once they are written; cut where a stop was asked for."""
        with ThreadPoolExecutor(1) as writer:
            behind: WriteBehind[Written] = WriteBehind(writer)
            # What is finished is written and told, whatever stops the run.
            try:
                for event in self._pipeline.work(jobs, self._folder, started):
                    match event:
                        case Lost():
                            yield self._record_failure(event)
                        case Request():
                            behind.submit(partial(self._write, event))
                        case _:
                            yield event
                    yield from self._record_written(behind, wait=False)
                    self._stop_if_asked()
                    if self._limit.is_over:
                        break
                yield from self._record_written(behind, wait=True)
            except (GeneratorExit, KeyboardInterrupt):
                list(self._record_written(behind, wait=True))
                raise
            except Exception:
                yield from self._record_written(behind, wait=True)
                raise

    def _write(self, done: Request[Job]) -> Written:
        """Errors of the machine are raised where the write is collected; others are the job's."""
        if self._folder is None:
            return done, None
        try:
            return done, self._pipeline.write(done, self._folder)
        except MachineError:
            raise
        except Exception as error:
            return done, error

    def _record_written(self, behind: WriteBehind[Written], *, wait: bool) -> Iterator[JobEnded]:
        for (done, output), seconds in behind.finished(wait=wait):
            done.clock.overlapped_s["write"] += seconds
            if isinstance(output, Exception):
                yield self._record_failure(done.as_lost(output))
                continue
            done.clock.enter("write")
            facts = self._facts(done.job, done.source_digests)
            outcome = self._append(self._pipeline.outcome(done, output, facts))
            yield JobEnded(outcome)

    def _record_failure(self, lost: Lost[Job]) -> JobEnded:
        facts = self._facts(lost.job, [*map(source_digest, lost.job.images)])
        said = line_facts(lost, facts, *lost.warnings, *lost.warnings_if_lost)
        outcome = failed_job(lost.job, self._config, facts.attempt, lost.error, **said)
        return JobEnded(self._append(outcome))

    def _facts(self, job: Job, digests: Sequence[str]) -> Facts:
        self._attempts[job.custom_id] += 1
        counts, peak = self._pipeline.cache_counts(), self._pipeline.peak_memory_mb()
        keys = key_of(job, digests, self._config), finishing_key(job, self._config.output)
        return Facts(*keys, self._attempts[job.custom_id], counts, peak)

    def _append(self, outcome: Outcome) -> Outcome:
        if self._folder is not None:
            self._folder.append(outcome)
        return outcome
