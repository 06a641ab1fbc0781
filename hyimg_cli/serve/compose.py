"""The parts of a server put together: its engine, what callers keep, batches, single requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyimg_cli.engine.run import ManifestRun, OnEvent
from hyimg_cli.engine.runner import RunRequest, Summary
from hyimg_cli.serve import batches, uploads
from hyimg_cli.serve.app import Server, is_loopback
from hyimg_cli.serve.keys import Keys
from hyimg_cli.serve.metrics import Metrics
from hyimg_cli.serve.online import Online
from hyimg_cli.serve.wire import Wire
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.paths import MODEL_NAME
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import JobEnded

if TYPE_CHECKING:
    from hyimg_cli.engine.service import Service


@dataclass(frozen=True)
class Limits:
    """How many pictures of single requests may wait, how many denoise steps one may have, and how
    many seconds they get to end.
    """

    most_waiting: int = 64
    most_steps: int = 100
    grace_s: float = 30.0


def build_server(
    service: "Service",
    settings: Mapping[str, Setting],
    config: RunConfig,
    state: Path,
    keys: Keys,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    log: Callable[[Mapping[str, Any]], object] = lambda line: None,
) -> Server:
    """A server around an engine that is not started yet. Raises StorageError."""
    metrics, files = Metrics(), uploads.Uploads(state)
    model = config.model.model
    # A folder is known by its name: where it is, is nobody's business.
    models = (Path(model).resolve().name if MODEL_NAME.is_path(model) else model,)
    wire = Wire(models, service.card.most_images, limits.most_steps, files)

    def run_of(request: RunRequest, scope: str, caller: str) -> ManifestRun:
        return _CountedRun(metrics, request, lambda _: service.session(scope, caller))

    kept = batches.Batches(state, files, config, settings, run_of, wire)
    online = Online(
        *(state, settings, wire, metrics),
        session_for=lambda caller: service.session(caller, caller, is_online=True),
        rate=lambda: service.counts()["pictures_per_s"],
        most_waiting=limits.most_waiting,
    )
    return Server(
        engine=service,
        batches=kept,
        online=online,
        metrics=metrics,
        keys=keys,
        models=models,
        routes=[*uploads.routes(files), *batches.routes(kept)],
        is_local=is_loopback(host),
        grace_s=limits.grace_s,
        log=log,
    )


class _CountedRun(ManifestRun):
    """The run of a batch, whose pictures are counted."""

    def __init__(self, metrics: Metrics, *run: Any) -> None:
        super().__init__(*run)
        self._metrics = metrics

    def run(self, on_event: OnEvent, *, age_s: float = 0.0) -> Summary:
        def count(event: Any) -> None:
            if isinstance(event, JobEnded):
                self._metrics.ended("batch", event.outcome)
            on_event(event)

        return super().run(count, age_s=age_s)
