"""A loaded model at work on a plan: the one place that holds model, memo and output folder at once.

A picture is written, then its line, then `JobDone` leaves the session: a killed run never has a
line without its picture.
"""

import gc
import time
from collections.abc import Generator, Iterator

import torch

from hyimg_cli import __version__
from hyimg_cli.batch.journal import RunFolder
from hyimg_cli.batch.resolved import job_to_json
from hyimg_cli.engine.clock import PhaseClock
from hyimg_cli.engine.image import Picture, Progress, draw
from hyimg_cli.engine.keys import key_of, source_digest
from hyimg_cli.engine.outcomes import Facts, done, failed
from hyimg_cli.errors import Interrupted, MachineError
from hyimg_cli.media.images import SourceImage, write_png
from hyimg_cli.media.metadata import PictureFacts, png_text
from hyimg_cli.models import registry
from hyimg_cli.models.protocols import Encoded, MixedModel
from hyimg_cli.spec.events import (
    Event,
    GroupStarted,
    JobDone,
    JobFailed,
    JobStarted,
    ModelLoaded,
    Outcome,
    OutputFile,
)
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import ModelChoice, RunConfig
from hyimg_cli.store.memo import Memo

_SOURCE_MEMO_BYTES = 2 << 30


class Session:
    """Runs plans. One model is resident at a time and stays loaded from one plan to the next."""

    def __init__(self, config: RunConfig, folder: RunFolder | None = None) -> None:
        """Without a `folder` pictures are made and dropped: outcomes name no files."""
        self._config = config
        self._folder = folder
        self._model: MixedModel | None = None
        self._sources: Memo[tuple[str, str], Encoded] = Memo(_SOURCE_MEMO_BYTES, _encoded_bytes)
        self._stop_signal: int | None = None

    def request_stop(self, signal_number: int) -> None:
        """Stop after the current token or denoise step; `run` then raises Interrupted."""
        self._stop_signal = signal_number

    def run(self, plan: Plan) -> Generator[Event, None, None]:
        """Every job of the plan, in order. A job's failure is an event; the session's is raised."""
        started = time.perf_counter()
        attempts = self._attempts_before()
        for group in plan.groups:
            yield from self._use(group.model)
            yield GroupStarted(group.model, group.size_class, len(group.jobs))
            for job in group.jobs:
                yield JobStarted(job.custom_id)
                attempt = attempts.get(job.custom_id, 0) + 1
                outcome = yield from self._attempted(job, started, attempt)
                yield JobDone(outcome) if outcome.status == "done" else JobFailed(outcome)
                if outcome.status == "failed" and self._config.failure.fail_fast:
                    return

    def _use(self, name: str) -> Iterator[ModelLoaded]:
        """Make `name` the resident model."""
        if self._model is not None and self._model.card.model == name:
            return
        self._model = None
        self._sources.clear()
        gc.collect()
        started = time.perf_counter()
        choice = self._config.model
        self._model = registry.load(ModelChoice(name, choice.revision, choice.dtype, choice.device))
        yield ModelLoaded(
            model=name,
            load_s=time.perf_counter() - started,
            device=self._model.device_name,
            dtype=self._model.dtype_name,
            parameters=self._model.parameter_count,
        )

    def _attempted(
        self, job: ImageJob, started: float, attempt: int
    ) -> Generator[Progress, None, Outcome]:
        """The job's outcome, tried again while its failure may pass."""
        for retry in range(self._config.failure.max_retries + 1):
            clock = PhaseClock(started, _synchronize)
            outcome = yield from self._outcome(job, clock, attempt + retry)
            if self._folder is not None:
                self._folder.append(outcome)
            if outcome.error is None or not outcome.error.retryable:
                break
        return outcome

    def _outcome(
        self, job: ImageJob, clock: PhaseClock, attempt: int
    ) -> Generator[Progress, None, Outcome]:
        try:
            picture = yield from self._watched(self._drawn(job, clock))
            clock.enter("write")
            output = self._written(job, picture)
            key = key_of(job, picture.source_digests, self._config)
            return done(job, picture, output, Facts(key, attempt, clock.timings_s()))
        except (Interrupted, MachineError):
            raise
        except Exception as error:  # the one border where a job's fault stops
            digests = [source_digest(path) for path in job.images]
            key = key_of(job, digests, self._config)
            return failed(job, error, Facts(key, attempt, clock.timings_s()))

    def _drawn(self, job: ImageJob, clock: PhaseClock) -> Generator[Progress, None, Picture]:
        assert self._model is not None, "a model is loaded before its jobs run"
        return draw(job, self._model, self._config.reuse, encode=self._encode, clock=clock)

    def _watched(
        self, story: Generator[Progress, None, Picture]
    ) -> Generator[Progress, None, Picture]:
        """The story, cut between two of its events when a stop was asked for."""
        while True:
            if self._stop_signal is not None:
                story.close()
                raise Interrupted(self._stop_signal)
            try:
                yield next(story)
            except StopIteration as end:
                picture: Picture = end.value
                return picture

    def _encode(self, image: SourceImage) -> Encoded:
        model = self._model
        assert model is not None, "a model is loaded before its jobs run"
        return self._sources.get(
            (model.card.model, image.digest),
            lambda: model.encode_source(image.pixels, image.digest),
        )

    def _written(self, job: ImageJob, picture: Picture) -> OutputFile | None:
        if self._folder is None:
            return None
        path = self._folder.path_for(job.custom_id)
        text = self._metadata(job, picture) if self._config.output.metadata else {}
        sha256, pixel_sha256 = write_png(path, picture.pixels, text)
        height, width = picture.pixels.shape[:2]
        relative = path.relative_to(self._folder.folder).as_posix()
        return OutputFile(relative, sha256, pixel_sha256, width, height, job.seed)

    def _metadata(self, job: ImageJob, picture: Picture) -> dict[str, str]:
        assert self._model is not None, "a model is loaded before its jobs run"
        facts = PictureFacts(
            size=picture.bucket.size,
            model_name=self._model.card.name,
            model_fingerprint=registry.fingerprint(job.model, self._config.model.revision),
            version=__version__,
            cot_text=picture.written.text,
            cot_token_ids=picture.written.ids,
            ratio_index=picture.bucket.ratio_index,
        )
        return png_text(job, job_to_json(job), facts)

    def _attempts_before(self) -> dict[str, int]:
        if self._folder is None:
            return {}
        return {name: int(line["attempt"]) for name, line in self._folder.results().items()}


def _synchronize() -> None:
    """Wait for the GPU, so that a phase's clock stops when its work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _encoded_bytes(encoded: Encoded) -> int:
    return sum(rows.nbytes for rows in vars(encoded.rows).values())
