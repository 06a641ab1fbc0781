"""Record a group's jobs: files, then lines, then `JobEnded`; retry failures.

A file is written before its line, and the line before `JobEnded` is sent. So a killed run never has
a line without its file.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from hyimg_cli.engine.failures import FailureLimit, failed_job
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import finishing_key, key_of, model_print, source_digest
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.request import Facts, Lost, Request, line_facts
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, JobEnded, Outcome, OutputFile
from hyimg_cli.spec.job import Job

AnyPipeline = Pipeline[Any, Any, Any]
# As `Pipeline.work`: jobs on their way, in a folder, by clocks that began then.
Work = Callable[
    [Sequence[Any], JobFolder | None, float], Iterator[Event | Request[Any] | Lost[Any]]
]
# A finished job, and its file or why it has none; None where there is no folder.
Written = tuple[Request[Job], OutputFile | Exception | None]


class Recorder:
    """Records the jobs of one pipeline in a folder; without one pixels are dropped, and outcomes
    name no files.
    """

    def __init__(
        self,
        pipeline: AnyPipeline,
        config: RunConfig,
        folder: JobFolder | None,
        limit: FailureLimit,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        """`limit` counts the run's failures. `is_elsewhere`: another thread works on the jobs, and
        this one records each as soon as it is finished.
        """
        self._pipeline, self._config, self._folder = pipeline, config, folder
        self._limit, self._is_elsewhere = limit, is_elsewhere
        # How often each job was tried; a folder without a journal does not count them.
        self._attempts = folder.attempts.copy() if folder else Counter[str]()

    def run(self, jobs: Sequence[Job], work: Work, started: float) -> Iterator[Event]:
        """Events of jobs on their way through `work`; failures that may pass are tried again
        behind the others.
        """
        by_id = {job.custom_id: job for job in jobs}
        again: dict[str, JobEnded] = {}
        for retries_left in range(self._config.failure.max_retries, -1, -1):
            for event in self._record(jobs, work, started):
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
            jobs = [by_id[name] for name in again]
        yield from again.values()  # of a run that is over

    def _record(self, jobs: Sequence[Job], work: Work, started: float) -> Iterator[Event]:
        """Progress as it is; jobs once they are written; cut where the work raises, or the run is
        over.
        """
        with ThreadPoolExecutor(1) as writer:
            behind: WriteBehind[Written] = WriteBehind(writer)
            # What is finished is written and told, whatever stops the run.
            try:
                for event in work(jobs, self._folder, started):
                    match event:
                        case Lost():
                            yield self._record_failure(event)
                        case Request():
                            behind.submit(partial(self._write, event))
                        case _:
                            yield event
                    yield from self._record_written(behind, wait=self._is_elsewhere)
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
        made_of = tuple(digests), model_print(job, self._config)
        return Facts(*keys, *made_of, self._attempts[job.custom_id], counts, peak)

    def _append(self, outcome: Outcome) -> Outcome:
        if self._folder is not None:
            self._folder.append(outcome)
        return outcome
