"""A session of a replica without torch: it does what a prompt says.

    die          its process is killed at this job        die once     only the first time
    hang         it says nothing any more, once           stop         it is stopped, once
    fail         the job fails                            cut short    it dies behind step 2, once
    company      it waits for another replica with work
    no checkpoint, gpu, crash     the session itself fails

What must outlive a replica, its process id among it, is in `marks` beside the output folder; so is
what the run has heard of. A number in its file `holds`: behind so many jobs every replica waits
to be stopped. In the environment: PACE_S, seconds for each step of a job; DIES: as soon as it has
work; LAST: it waits until so many pictures of others are there;
DISK_FULL_AFTER: so many lines of it, the disk is full.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Generator

from hyimg_cli.errors import CheckpointError, Interrupted, JobError, MachineError
from hyimg_cli.files import replace_file, storage_error
from hyimg_cli.journal.journal import JobFolder
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest
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
from hyimg_cli.spec.job import Job, VideoJob
from hyimg_cli.spec.plan import Plan

PACE_S = float(os.environ.get("PACE_S", "0.01"))
LAST = int(os.environ.get("LAST", "0"))
DISK_FULL_AFTER = int(os.environ.get("DISK_FULL_AFTER", sys.maxsize))
WAIT_S = 120


class FakeSession:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stopped_by = 0
        self._model = ""
        self._begun = 0
        self._outputs = config.output.folder / "outputs"
        self._marks = config.output.folder.parent / "marks"
        self._marks.mkdir(exist_ok=True)
        (self._marks / f"{os.getpid()}.pid").touch()
        holds = self._marks / "holds"
        self._holds = int(holds.read_text()) if holds.exists() else sys.maxsize

    def request_stop(self, signal_number: int) -> None:
        self._stopped_by = signal_number
        (self._marks / f"{os.getpid()}.stopped").touch()

    def run(self, plan: Plan, folder: JobFolder, *, whole: Plan) -> Generator[Event, None, None]:
        (self._marks / f"{os.getpid()}.at-work").touch()
        if "DIES" in os.environ:
            die()
        assert {job.custom_id for job in plan.jobs} <= {job.custom_id for job in whole.jobs}
        for group in plan.groups:
            if group.model != self._model:
                self._model = group.model
                yield ModelLoaded(group.model, 0.5, "cpu", "float32", 1000)
            yield GroupStarted(group.model, group.size_class)
            for job in group.jobs:
                yield from self._job(job, folder)

    def _job(self, job: Job, folder: JobFolder) -> Generator[Event, None, None]:
        yield JobStarted(job.custom_id)
        self._obey(job, folder)
        latents = folder.latents_for(job.custom_id)
        if isinstance(job, VideoJob):
            begun = latents.read_bytes() if latents.exists() else b""
            (self._marks / f"{job.custom_id}.found").write_bytes(begun)
        for step in range(1, job.num_inference_steps + 1):
            if step == 2 and self._begun > self._holds:
                (self._marks / f"{os.getpid()}.held").touch()
                wait_for(lambda: self._stopped_by)
            if self._stopped_by:
                raise Interrupted(self._stopped_by)
            time.sleep(PACE_S)
            if isinstance(job, VideoJob):
                latents.parent.mkdir(exist_ok=True)
                replace_file(latents, b"%d" % step)
                if step == 2 and "cut short" in job.prompt and self._first_time(job):
                    die()
            yield Progress(job.custom_id, "denoise", step, job.num_inference_steps)
        outcome = self._made(job, folder)
        if self._begun > DISK_FULL_AFTER:
            raise storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder.folder)
        yield JobEnded(folder.append(outcome))

    def _made(self, job: Job, folder: JobFolder) -> Outcome:
        key = job_keys([job], self._config)[job.custom_id]
        attempt = folder.attempts.get(job.custom_id, 0) + 1
        if "fail" in job.prompt:
            failure = Failure("job.fake", "it was told to fail", "", retryable=False)
            return Outcome(job.custom_id, "failed", key=key, attempt=attempt, error=failure)
        try:
            path = folder.place_for(job, ".png")
        except JobError as error:
            failure = Failure.of(error)
            return Outcome(job.custom_id, "failed", key=key, attempt=attempt, error=failure)
        replace_file(path, job.prompt.encode())
        sha256 = digest.of_bytes(job.prompt.encode())
        file = OutputFile(f"outputs/{job.custom_id}.png", sha256, sha256, 16, 16, job.seed)
        return Outcome(job.custom_id, "done", key=key, attempt=attempt, outputs=(file,))

    def _obey(self, job: Job, folder: JobFolder) -> None:
        self._begun += 1
        if self._begun == 1:
            wait_for(lambda: len(list(self._outputs.glob("*.png"))) >= LAST)
        if "company" in job.prompt:
            wait_for(lambda: len(list(self._marks.glob("*.at-work"))) > 1)
        if "no checkpoint" in job.prompt:
            raise CheckpointError("there is none", hint="copy it")
        if "gpu" in job.prompt:
            raise MachineError("the GPU failed", code="machine.gpu")
        if "crash" in job.prompt:
            raise RuntimeError("a mistake of ours")
        if "hang" in job.prompt and self._first_time(job):
            time.sleep(600)
        if "stop" in job.prompt and self._first_time(job):
            os.kill(os.getpid(), signal.SIGSTOP)
        if "die" in job.prompt.split() and ("once" not in job.prompt or self._first_time(job)):
            leftover = folder.path_for(job.custom_id).with_name(f".half.{os.getpid()}.tmp")
            leftover.write_bytes(b"half a picture")
            die()

    def _first_time(self, job: Job) -> bool:
        mark = self._marks / f"{job.custom_id}.mark"
        is_first = not mark.exists()
        mark.touch()
        return is_first


def wait_for(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
