"""Record a group's jobs: files, then lines, then `JobEnded`.

A file is written before its line, and the line before `JobEnded` is sent. A killed run therefore
never has a line without its file.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import filterfalse
from typing import Any

from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import file_digest, finishing_key, key_of, model_print
from hyimg_cli.manifest.envelope import warnings_of
from hyimg_cli.media.images import is_warning
from hyimg_cli.pipelines.failures import FailureLimit, failed_job, with_retries
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.prefetch import WriteBehind
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Event, JobEnded, Outcome, OutputFile, TextFile
from hyimg_cli.spec.job import ImageJob, Job, Size

AnyPipeline = Pipeline[Any, Any, Any]
# Same as `Pipeline.work`: runs jobs in a folder, with clocks that begin at the given time.
Work = Callable[
    [Sequence[Any], JobFolder | None, float], Iterator[Event | Request[Any] | Lost[Any]]
]
# A finished job, and its files or the error of writing them; no files without a folder.
Written = tuple[Request[Job], Sequence[OutputFile | TextFile] | Exception]


class Recorder:
    """Records the jobs of one pipeline in a folder.

    Without a folder, pixels are dropped and outcomes name no files.
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
        """`limit` counts the run's failures.

        `is_elsewhere`: another thread works on the jobs, and each job is recorded as soon as it
        finishes.
        """
        self._pipeline, self._config, self._folder = pipeline, config, folder
        self._limit, self._is_elsewhere = limit, is_elsewhere
        # How often each job was tried; always zero at the start in a folder without a journal.
        self._attempts = folder.attempts.copy() if folder else Counter[str]()

    def run(self, jobs: Sequence[Job], work: Work, started: float) -> Iterator[Event]:
        """Yield the events of jobs that run through `work`, and of their retries."""
        record = partial(self._record, work=work, started=started)
        yield from with_retries(jobs, record, self._limit)

    def _record(self, jobs: Sequence[Job], work: Work, started: float) -> Iterator[Event]:
        """Yield progress at once, and jobs once they are written.

        Ends early if `work` raises or the run is over.
        """
        with ThreadPoolExecutor(1) as writer:
            behind: WriteBehind[Written] = WriteBehind(writer)
            # Finished jobs are written and reported, whatever stops the run.
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
        """Write a job's file; errors other than the machine's are returned with the job."""
        if self._folder is None:
            return done, ()
        try:
            return done, self._pipeline.write(done, self._folder)
        except MachineError:
            raise
        except Exception as error:
            return done, error

    def _record_written(self, behind: WriteBehind[Written], *, wait: bool) -> Iterator[JobEnded]:
        for (done, files), seconds in behind.finished(wait=wait):
            done.clock.overlapped_s["write"] += seconds
            if isinstance(files, Exception):
                yield self._record_failure(done.as_lost(files))
                continue
            done.clock.enter("write")
            own = self._pipeline.line_fields(done)
            warnings = (*done.warnings, *own.pop("warnings", ()))
            fields = self._fields(done, done.source_sha256, warnings, done.notes)
            fields |= done.job.copied() | own
            fields |= {"denoise_steps": done.denoise_steps, "step_cache": done.step_cache}
            if files and not isinstance(files[0], TextFile):
                fields["notes"] += tuple(_on_size(done.job, files[0], fields["notes"]))
            # The latents of a job that was drawn are kept under its key.
            place = done.checkpoint
            key = place.key if place else key_of(done.job, done.sources_as_read, self._config)
            found = Outcome(done.job.custom_id, "done", key, outputs=tuple(files), **fields)
            yield self._append(found)

    def _record_failure(self, lost: Lost[Job]) -> JobEnded:
        digests = [*map(file_digest, lost.job.images)]
        notes = (*lost.notes, *lost.notes_if_lost)
        fields = self._fields(lost, digests, lost.warnings, notes)
        return self._append(failed_job(lost.job, self._config, error=lost.error, **fields))

    def _fields(
        self,
        work: Request[Job],
        digests: Sequence[str],
        warnings: Sequence[str],
        notes: Sequence[str],
    ) -> dict[str, Any]:
        """Return the line fields of a job that was at work, however it ended."""
        job, clock = work.job, work.clock
        self._attempts[job.custom_id] += 1
        ignored, said = warnings_of(json.loads(job.extra_json)), dict.fromkeys(notes)
        return {
            "timings_s": _rounded(clock.timings_s()),
            "share_s": _rounded(clock.share_s()),
            "overlapped_s": _rounded(clock.overlapped_s),
            "attempt": self._attempts[job.custom_id],
            "cache": self._pipeline.cache_counts(),
            "peak_memory_mb": round(self._pipeline.peak_memory_mb(), 1),
            "edit": work.edit,
            "finishing_key": finishing_key(job, self._config.output),
            "source_sha256": tuple(digests) or None,
            "model_sha256": model_print(job, self._config),
            "warnings": tuple(dict.fromkeys((*warnings, *filter(is_warning, said), *ignored))),
            "notes": tuple(filterfalse(is_warning, said)),
        }

    def _append(self, outcome: Outcome) -> JobEnded:
        return JobEnded(outcome if self._folder is None else self._folder.append(outcome))


def _on_size(job: Job, output: OutputFile, notes: Sequence[str]) -> Iterator[str]:
    """Yield a note on a picture in another size than its job asks for, unless one exists."""
    asked = job.asked_size if isinstance(job, ImageJob) else None
    made = Size(output.height, output.width)
    if asked is not None and asked != made:
        note = f"{asked} fitted to {made}"
        if not any(one.startswith(note) for one in notes):
            yield note


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
