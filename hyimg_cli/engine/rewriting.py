"""A session that rewrites prompts, and draws nothing: `hyimg think` for models with a rewriter.

The rewritten prompt stands in the line's `prompt`, and the given one in `x_rewritten`. So people
read and edit it, and `generate` draws it as any prompt, without loading the rewriter.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import key_of, source_digest
from hyimg_cli.models import registry
from hyimg_cli.pipelines.failures import FailureLimit, failed_job, with_retries
from hyimg_cli.pipelines.torch_settings import torch_settings
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobEnded,
    JobStarted,
    ModelLoaded,
    ModelLoading,
    Outcome,
)
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.plan import Plan

if TYPE_CHECKING:
    from hyimg_cli.models.latent import Rewriter


class RewritingSession:
    """Rewrites the prompts of plans, one after another."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rewriter: Rewriter | None = None
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Stop after the current text; `run` then raises Interrupted."""
        self._stop_signal = signal_number

    def close(self) -> None:
        self._rewriter = None

    def run(self, plan: Plan, folder: JobFolder | None = None) -> Generator[Event, None, None]:
        """Rewrite the prompt of every job; a job's failure is an event.

        If failures of jobs end the run, ConsecutiveErrors is raised after its last event.
        """
        assert folder is not None, "texts are written to a file"
        limit = FailureLimit(self._config.failure.for_run(len(plan.jobs)))
        for group in plan.groups:
            with torch_settings(self._config.model, draws=False):
                yield ModelLoading(group.model)
                began = time.perf_counter()
                choice = replace(self._config.model, model=group.model)
                self._rewriter = loaded = registry.load_rewriter(choice)
                took_s = time.perf_counter() - began
                yield ModelLoaded(
                    group.model, took_s, loaded.device, loaded.dtype, loaded.parameters
                )
                yield GroupStarted(group.model, group.size_class)
                rewrite = partial(self._work, rewriter=loaded, folder=folder, limit=limit)
                yield from with_retries(group.jobs, rewrite, limit)
            if limit.is_over:
                limit.raise_fault()
                return

    def _work(
        self, jobs: Sequence[Job], rewriter: "Rewriter", folder: JobFolder, limit: FailureLimit
    ) -> Iterator[Event]:
        for job in jobs:
            self._stop_if_asked()
            if limit.is_over:
                return
            assert isinstance(job, ImageJob), "videos have no rewriter"
            yield JobStarted(job.custom_id)
            yield JobEnded(folder.append(self._rewritten(job, rewriter, folder)))

    def _rewritten(self, job: ImageJob, rewriter: "Rewriter", folder: JobFolder) -> Outcome:
        began = time.perf_counter()
        try:
            digests = [*map(source_digest, job.images)]
            made = rewriter.rewrite(job, digests)
        except Exception as error:
            attempt = folder.attempts[job.custom_id] + 1
            return failed_job(job, self._config, attempt, error)
        cut = "the rewritten prompt was cut at its rewriter's limit: read its end"
        times = {"total": time.perf_counter() - began}
        return Outcome(
            job.custom_id,
            "done",
            key_of(job, digests, self._config),
            cot_text=made.text,
            written={"tokens": made.tokens},
            timings_s=times,
            share_s=times,
            warnings=(cut,) * made.is_cut,
            notes=made.notes,
        )

    def _stop_if_asked(self) -> None:
        if self._stop_signal is not None:
            raise Interrupted(self._stop_signal)
