"""A server around an engine without a model, in this process, and the official client for it."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai

from hyimg_cli.errors import Interrupted
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.manifest.envelope import warnings_of
from hyimg_cli.manifest.output_names import suffix_of
from hyimg_cli.media import formats
from hyimg_cli.media.images import pixel_digest
from hyimg_cli.models import registry
from hyimg_cli.serve.app import HttpServer, Server
from hyimg_cli.serve.keys import Keys
from hyimg_cli.settings.config import settle
from hyimg_cli.settings.run import FailurePolicy, OutputConfig, RunConfig
from hyimg_cli.spec.events import Event, Failure, JobEnded, JobStarted, Outcome, OutputFile
from hyimg_cli.spec.job import ImageJob
from hyimg_cli.spec.plan import Plan


class FakeSession:
    """Draws a plain picture of a job's seed; "fail" and "crash" in a prompt do so."""

    def __init__(self, service: "FakeService", caller: str, *, is_online: bool) -> None:
        self.service, self.caller, self.is_online = service, caller, is_online
        self._stopped_by = 0

    def request_stop(self, signal_number: int) -> None:
        self._stopped_by = signal_number

    def close(self) -> None:
        """Nothing is held."""

    def run(self, plan: Plan, folder: RunFolder, **_: Any) -> Generator[Event, None, None]:
        service = self.service
        service.sessions.append(self)
        try:
            folder.make_places(plan.jobs)
            for job in plan.jobs:
                self._wait_for(service.gate)
                yield JobStarted(job.custom_id)
                service.drawn[job.prompt] += 1
                self._wait_for(service.hold)
                for _ in range(round(service.pace_s / 0.01)):
                    time.sleep(0.01)
                    self._stop_if_asked()
                if "crash" in job.prompt:
                    raise RuntimeError("a mistake of ours")
                outcome = self._outcome(job, folder)
                folder.append(outcome)
                service.painted.append(job.custom_id)
                yield JobEnded(outcome)
                if error_now := service.error:
                    service.error = None
                    raise error_now
        finally:
            service.sessions.remove(self)

    def _wait_for(self, gate: threading.Event) -> None:
        while not gate.wait(0.005):
            self._stop_if_asked()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stopped_by:
            self.service.dropped += 1
            raise Interrupted(self._stopped_by)

    def _outcome(self, job: ImageJob, folder: RunFolder) -> Outcome:
        key, attempt = job_keys([job], CONFIG)[job.custom_id], folder.attempts[job.custom_id] + 1
        if "fail" in job.prompt and "0" not in job.custom_id[-1:]:
            failure = Failure("job.fake", f"told to: {job.images}", "", retryable=False)
            return Outcome(job.custom_id, "failed", key, attempt, error=failure)
        pixels = np.full((16, 16, 3), job.seed % 251, dtype=np.uint8)
        data = formats.encode(pixels, job.encoding, None)
        name, sha256 = folder.save(job, suffix_of(job), data)
        file = OutputFile(name, sha256, pixel_digest(pixels), 16, 16, job.seed)
        said = {"warnings": tuple(warnings_of(json.loads(job.extra_json))), "notes": ("a note",)}
        share = {"denoise_rest": 0.25}
        return Outcome(
            *(job.custom_id, "done", key, attempt, (file,)),
            share_s=share,
            cot_text="a text",
            **said,
        )


# As `hyimg serve` has it, but without pages.
PATIENT = FailurePolicy(fail_fast=False, max_consecutive_errors=0)
CONFIG = RunConfig(OutputConfig(Path(), report=False), failure=PATIENT)


class FakeService:
    """An engine whose jobs begin while `gate` is open, and end while `hold` is, `pace_s` later.

    `error` is what ends the next run after its first picture.
    """

    def __init__(self) -> None:
        self.card = registry.model_card(CONFIG.model.model, None)
        self.is_ready, self.fault = False, None
        self.gate, self.hold = threading.Event(), threading.Event()
        self.gate.set()
        self.hold.set()
        self.pace_s, self.error = 0.0, None
        self.sessions: list[FakeSession] = []
        self.scopes: list[tuple[str, str]] = []
        self.painted: list[str] = []
        self.drawn, self.dropped = Counter[str](), 0

    def start(self) -> None:
        self.is_ready = True

    def counts(self) -> dict[str, Any]:
        waiting = {"online": 0, "batch": 0}
        return {"waiting": waiting, "at_work": {"think": 2}, "pictures_per_s": 4.0}

    def session(self, scope: str, caller: str, *, is_online: bool = False) -> FakeSession:
        assert not is_online or scope == caller
        self.scopes.append((scope, caller))
        return FakeSession(self, caller, is_online=is_online)

    def stop(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        while self.sessions and time.monotonic() < until:
            time.sleep(0.005)
        for session in [*self.sessions]:
            session.request_stop(15)


def server_of(service: Any, state: Path, keys: Keys | None = None, **about: Any) -> Server:
    """A server around an engine; `about`: as `Server` takes it."""
    config = replace(CONFIG, output=replace(CONFIG.output, folder=state))
    known = keys or Keys({})
    return Server(service, settle({}, {}, {}), config, state, known, **about)


class Running:
    """A server of a test: with a client in this process, or listening on a port."""

    def __init__(self, server: Server, service: FakeService, state: Path, log: list[Any]) -> None:
        self.server, self.service, self.state, self.log = server, service, state, log
        self.port = 0
        self._clients: list[openai.OpenAI] = []
        self.thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none", **more: Any) -> openai.OpenAI:
        # Every answer must fit the client's own types.
        more = {"_strict_response_validation": True} | more
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **more)
        self._clients.append(made)
        return made

    @contextmanager
    def listening(self) -> Iterator[HttpServer]:
        """The server on a port of its own, in a thread."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            http = HttpServer(self.server)
            self.thread = threading.Thread(target=lambda: http.run(sockets=[listener]))
            self.thread.start()
            try:
                until(lambda: http.started and self.server.is_ready)
                yield http
            finally:
                self.service.gate.set()
                self.service.hold.set()
                self.server.is_stopping = True
                self.thread.join(20)
                for client in self._clients:
                    client.close()
        assert not self.thread.is_alive()


def until(is_so: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
