"""Runs of manifests in threads of their own, all with the engine of one server."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.engine.service import Service
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.settings.config import settings_of
from hyimg_cli.settings.run import BatchConfig, OutputConfig, RunConfig
from hyimg_cli.spec.events import JobEnded

PATIENCE_S = 60.0


class ServedBatch(threading.Thread):
    """A manifest's run in a thread of its own."""

    def __init__(
        self,
        service: Service,
        manifest: Path,
        out: Path,
        *,
        scope: str = "",
        is_online: bool = False,
    ) -> None:
        super().__init__(daemon=True)
        of_server = service.config
        config = replace(of_server, output=replace(of_server.output, folder=out))
        request = RunRequest(read_manifest(manifest), config, settings_of(config))
        self._run = ManifestRun(
            request, lambda _: service.session(scope or out.name, "key", is_online=is_online)
        )
        self.summary = Summary()
        self.error: BaseException | None = None
        self.has_line = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.summary = self._run.run(self._hear)
        except Exception as error:
            self.error = error

    def _hear(self, event: object) -> None:
        if isinstance(event, JobEnded):
            self.has_line.set()

    def request_stop(self) -> None:
        self._run.request_stop(signal.SIGTERM)

    def ended(self) -> "ServedBatch":
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self


@contextmanager
def serving(folder: Path, **parts: Any) -> Iterator[Service]:
    """A service that works until the block ends, and ends in order."""
    parts = {
        "batch": BatchConfig(max_size=4, prewarm=False),
        "output": OutputConfig(folder),
    } | parts
    service = Service(RunConfig(**parts))
    service.start()
    yield service
    service.stop(0.0)
    assert service.fault is None
