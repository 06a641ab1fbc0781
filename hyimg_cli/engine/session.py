"""Run pipelines on a plan: the only place that holds models, plan and folder."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.engine.recorder import AnyPipeline, Recorder
from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.memory.available import available_memory, limit_gpu_memory
from hyimg_cli.memory.fit import fits, need_of_second
from hyimg_cli.memory.refusals import refuse_conflicts
from hyimg_cli.models import registry
from hyimg_cli.pipelines.failures import FailureLimit
from hyimg_cli.pipelines.image.pipeline import ImagePipeline, LoadModel
from hyimg_cli.pipelines.latent.pictures import EditPipeline
from hyimg_cli.pipelines.parts import tickets_of
from hyimg_cli.pipelines.queue import TicketQueue
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.pipelines.timeouts import JobTimeout
from hyimg_cli.pipelines.torch_settings import torch_settings
from hyimg_cli.pipelines.video.pipeline import VideoPipeline
from hyimg_cli.remote import keep_copies_in
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, GroupStarted, ModelLoaded, ModelLoading, ModelReleased
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Group, Plan, VideoGroup


class Session:
    """Runs plans. A model stays loaded from one plan to the next.

    A second model is loaded in addition only if both fit into memory.
    """

    def __init__(self, config: RunConfig, load: LoadModel | None = None) -> None:
        """`load` loads every image model; `registry.load` by default.

        Benchmarks pass their own `load`, to share and inspect models.
        """
        keep_copies_in(DiskStore(config.cache.folder, config.cache.budget_bytes))
        self._config = config
        self._folder: JobFolder | None = None
        self._images = ImagePipeline(config, load)
        self._edits = EditPipeline(config)
        self._videos = VideoPipeline(config, self._images.forget)
        self._pipelines: tuple[AnyPipeline, ...] = (self._images, self._edits, self._videos)
        self._pipeline: AnyPipeline = self._images
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Stop after the current token or denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number
        for pipeline in self._pipelines:
            pipeline.is_stopping = True

    def close(self) -> None:
        """Release the models and end their worker processes; a later `run` loads them again."""
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
        """Run every job of the plan.

        A job's failure is an event, while the session's own errors are raised. If failures of jobs
        end the run, ConsecutiveErrors is raised after its last event.

        Without a `folder`, pixels are dropped and outcomes name no files. `whole`: the plan of
        which `plan` is a piece; what all of its jobs need at once is prepared together with the
        model.
        """
        refuse_conflicts(plan.jobs, self._config)
        limit_gpu_memory(self._config)
        self._folder = folder
        if folder:
            folder.make_places(plan.jobs)
        self._images.expect(whole or plan, is_known=whole is not None)
        limit = FailureLimit(self._config.failure.for_run(len(plan.jobs)))
        for group in plan.groups:
            with torch_settings(self._config.model, draws=isinstance(group, Group)):
                for event in self._prepare_group(group, whole or plan):
                    yield event
                    self._stop_if_asked()
                self._stop_if_asked()
                yield GroupStarted(group.model, group.size_class)
                # The jobs' clocks exclude loading and the preparation of other groups.
                started = time.perf_counter()
                recorder = Recorder(self._pipeline, self._config, folder, limit)
                yield from recorder.run(group.jobs, self._work, started)
            if limit.is_over:
                limit.raise_fault()
                return

    def _work(
        self, jobs: Sequence[Job], folder: JobFolder | None, started: float
    ) -> Iterator[Event | Request[Job] | Lost[Job]]:
        """Run a group's jobs; end early if a stop was requested."""
        told = deque[Any]()
        tickets = {
            job.custom_id: tickets_of(job, told.append, folder=folder, submitted=started)
            for job in jobs
        }
        queue = TicketQueue(chain.from_iterable(tickets.values()), is_whole=True)
        timeout = JobTimeout(self._config.failure.job_timeout, {one.custom_id: one for one in jobs})
        for _ in self._pipeline.work(queue):
            while told:
                yield timeout.heed(told.popleft())
            self._stop_if_asked()
            queue.drop(ticket for name in timeout.overdue() for ticket in tickets[name])

    def _stop_if_asked(self) -> None:
        signal_number, self._stop_signal = self._stop_signal, None
        if signal_number is not None:
            for pipeline in self._pipelines:
                pipeline.is_stopping = False
            raise Interrupted(signal_number)

    def _prepare_group(self, group: Group | VideoGroup, plan: Plan) -> Iterator[Event]:
        """Prepare the group's pipeline: its model, its shared work and its shapes."""
        choice = self._config.model
        if isinstance(group, Group):
            card = registry.model_card(group.model, choice.revision)
            self._pipeline = self._edits if card.denoises_latents else self._images
            nbytes = card.weight_bytes
        else:
            self._pipeline = self._videos
            films = registry.video_card(group.model, choice.revision, choice.video_components)
            nbytes = films.weight_bytes
        pipeline: AnyPipeline = self._pipeline
        others = [one for one in self._pipelines if one is not pipeline]
        if pipeline.model != group.model:
            for other in others:
                if (name := other.model) is None:
                    continue
                # Another model stays if both fit into memory with a full batch of this group.
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
