"""A server's files and batches without its engine: sessions that paint each picture at once."""

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hyimg_cli.engine.failures import failed_job
from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import Interrupted, JobError
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import key_of, source_digest
from hyimg_cli.serve.batches import Batches
from hyimg_cli.serve.uploads import Uploads
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import FailurePolicy, OutputConfig, RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.events import Event, JobEnded, JobStarted, Outcome, OutputFile
from hyimg_cli.spec.plan import Plan


@dataclass
class Painter:
    """A session whose pictures are their seeds. `pace_s` a picture; `error`: what ends the next
    run after its first picture.
    """

    pace_s: float = 0.0
    error: Exception | None = None
    scopes: list[tuple[str, str]] = field(default_factory=list)
    painted: list[str] = field(default_factory=list)

    def run_of(self, request: RunRequest, scope: str, caller: str) -> ManifestRun:
        self.scopes.append((scope, caller))
        return ManifestRun(request, lambda config: PainterSession(self, config))  # type: ignore


class PainterSession:
    def __init__(self, painter: Painter, config: RunConfig) -> None:
        self._painter, self._config, self._signal = painter, config, 0

    def request_stop(self, signal_number: int) -> None:
        self._signal = signal_number

    def close(self) -> None:
        """Nothing is held."""

    def run(
        self, plan: Plan, folder: JobFolder, *, whole: Plan | None = None
    ) -> Generator[Event, None, None]:
        for job in plan.jobs:
            yield JobStarted(job.custom_id)
            for _ in range(max(1, round(self._painter.pace_s / 0.01))):
                if self._signal:
                    raise Interrupted(self._signal)
                time.sleep(min(0.01, self._painter.pace_s))
            attempt = folder.attempts[job.custom_id] + 1
            if job.prompt.startswith("fail"):
                error = JobError("it was to fail", code="job.out-of-memory")
                outcome = failed_job(job, self._config, attempt, error)
            else:
                path = folder.path_for(job.custom_id)
                pixels = np.full((8, 8, 3), job.seed % 251, np.uint8)
                Image.fromarray(pixels).save(path)
                sha256 = digest.of_file(path)
                name = path.relative_to(folder.folder).as_posix()
                file = OutputFile(name, sha256, digest.of_bytes(pixels.tobytes()), 8, 8, job.seed)
                key = key_of(job, [*map(source_digest, job.images)], self._config)
                outcome = Outcome(job.custom_id, "done", key, attempt, (file,))
            folder.append(outcome)
            self._painter.painted.append(job.custom_id)
            yield JobEnded(outcome)
            if error_now := self._painter.error:
                self._painter.error = None
                raise error_now


@dataclass
class State:
    """What a server has of files and batches, on a folder."""

    uploads: Uploads
    batches: Batches

    @classmethod
    def of(cls, folder: Path, painter: Painter, **how: Any) -> "State":
        uploads = Uploads(folder)
        # As `hyimg serve` has it.
        patient = FailurePolicy(fail_fast=False, max_consecutive_errors=0)
        config = RunConfig(OutputConfig(folder, report=False), failure=patient)

        wire = Wire(("tiny-image",), 3, 100, uploads)
        facts = uploads, config, settle({}, {}, {}), painter.run_of, wire
        return cls(uploads, Batches(folder, *facts, **how))
