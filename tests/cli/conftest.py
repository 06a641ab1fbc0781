"""A session that behaves without a model: it writes pictures and the journal, and yields events."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hyimg_cli.errors import CheckpointError, Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.manifest.output_names import suffix_of
from hyimg_cli.media import formats
from hyimg_cli.media.images import pixel_digest
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import (
    Event,
    Failure,
    GroupStarted,
    JobEnded,
    JobStarted,
    ModelLoaded,
    Outcome,
    OutputFile,
    Progress,
)
from hyimg_cli.spec.job import Encoding, ImageJob
from hyimg_cli.spec.plan import Plan


class FakeSession:
    """Does what a prompt says: no checkpoint, fail, crash, no weights, SIGINT; else a picture.

    `meanwhile`: what somebody does in the run's folder while a job of that name is at work, or,
    by the name `close`, when the last one has ended.
    """

    ran: list[str]
    meanwhile: dict[str, Callable[[Path], object]]

    folder: RunFolder

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._stopped_by = 0

    def request_stop(self, signal_number: int) -> None:
        self._stopped_by = signal_number

    def run(self, plan: Plan, folder: RunFolder) -> Iterator[Event]:
        self.folder = folder
        self.attempts = dict(folder.attempts)
        folder.make_places(plan.jobs)
        if any("no checkpoint" in job.prompt for job in plan.jobs):
            raise CheckpointError("there is none", hint="copy it")
        yield ModelLoaded("fake", 0.5, "cpu", "float32", 1000)
        for group in plan.groups:
            yield GroupStarted(group.model, group.size_class)
            for job in group.jobs:
                yield from self._job(job)
                if self.config.failure.fail_fast and "fail" in job.prompt:
                    return

    def close(self) -> None:
        self.meanwhile.get("close", str)(self.folder.folder)

    def _job(self, job: ImageJob) -> Iterator[Event]:
        type(self).ran.append(job.custom_id)
        yield JobStarted(job.custom_id)
        yield Progress(job.custom_id, "think")
        yield Progress(job.custom_id, "think", 1)
        self._obey(job.prompt)
        self.meanwhile.get(job.custom_id, str)(self.folder.folder)
        yield Progress(job.custom_id, "denoise", 0, job.num_inference_steps)
        for step in range(1, job.num_inference_steps + 1):
            if self._stopped_by:
                raise Interrupted(self._stopped_by)
            yield Progress(job.custom_id, "denoise", step, job.num_inference_steps)
        outcome = self._failed(job) if "fail" in job.prompt else self._done(job)
        self.folder.append(outcome)
        yield JobEnded(outcome)

    def _obey(self, prompt: str) -> None:
        if "crash" in prompt:
            raise RuntimeError("a mistake of ours")
        if "no weights" in prompt:
            raise CheckpointError("a shard is missing", hint="copy it")
        for name in ("SIGINT", "SIGTERM"):
            if name in prompt:
                os.kill(os.getpid(), signal.Signals[name])

    def _key(self, job: ImageJob) -> str:
        return job_keys([job], self.config)[job.custom_id]

    def _done(self, job: ImageJob) -> Outcome:
        pixels = np.full((16, 16, 3), job.seed % 256, dtype=np.uint8)
        # Of a video there is a picture in its place.
        data = formats.encode(pixels, getattr(job, "encoding", Encoding()), None)
        name, sha256 = self.folder.save(job, suffix_of(job), data)
        file = OutputFile(name, sha256, pixel_digest(pixels), 16, 16, job.seed)
        return Outcome(
            job.custom_id,
            "done",
            key=self._key(job),
            attempt=self.attempts.get(job.custom_id, 0) + 1,
            outputs=(file,),
            denoise_steps=job.num_inference_steps,
            timings_s={"queue": 4.0, "total": 4.75},
            share_s={"denoise_rest": 0.25, "total": 0.25},
            metadata=json.loads(job.metadata_json),
        )

    def _failed(self, job: ImageJob) -> Outcome:
        failure = Failure("job.fake", "it was told to fail", "", retryable=False)
        return Outcome(job.custom_id, "failed", key=self._key(job), error=failure)


@pytest.fixture
def fake_session(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    """Puts the fake where the command looks for the session; `ran` lists the jobs it was given."""

    class Session(FakeSession):
        ran: list[str] = []
        meanwhile: dict[str, Callable[[Path], object]] = {}

    module = ModuleType("hyimg_cli.engine.session")
    module.Session = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Session
