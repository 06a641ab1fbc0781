"""A server's counts, times and gauges for Prometheus; labels contain no ids and no prompts."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hyimg_cli.spec.events import Outcome

__all__ = ["CONTENT_TYPE", "Metrics"]
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._pictures = Counter(
            "hyimg_pictures", "Pictures that have ended.", ["origin", "status"], registry=own
        )
        self._seconds = Histogram(
            "hyimg_picture_seconds",
            "A picture's share of the time of each phase.",
            ["origin", "phase"],
            buckets=_SECONDS,
            registry=own,
        )
        self._requests = Counter(
            "hyimg_http_requests", "Requests answered.", ["route", "status"], registry=own
        )
        self._retries = Counter(
            "hyimg_retries", "Requests that clients have retried.", registry=own
        )
        self._gauges = [
            Gauge(f"hyimg_{name}", text, [label], registry=own)
            for name, text, label in (
                ("pictures_waiting", "Pictures that are waiting.", "origin"),
                ("pictures_at_work", "Pictures in progress.", "stage"),
                ("batches", "Stored batches.", "status"),
            )
        ]
        self._ready = Gauge("hyimg_ready", "1 while the server accepts work.", registry=own)

    def ended(self, origin: str, outcome: Outcome) -> None:
        """Count a picture that has ended; `origin`: "online" or "batch"."""
        self._pictures.labels(origin, outcome.status).inc()
        for phase in outcome.share_s.keys() - {"total"}:
            self._seconds.labels(origin, phase).observe(outcome.share_s[phase])

    def answered(self, route: str, status: int, *, is_retry: bool) -> None:
        """Count a request by its route pattern."""
        self._requests.labels(route, str(status)).inc()
        self._retries.inc(is_retry)

    def text(self, counts: Mapping[str, Any], batches: Mapping[str, int], *, ready: bool) -> bytes:
        """Return the metrics in Prometheus' text format. `counts`: the engine's."""
        self._ready.set(ready)
        every = (counts["waiting"], counts["at_work"], batches)
        for gauge, values in zip(self._gauges, every, strict=True):
            gauge.clear()
            for label, value in values.items():
                gauge.labels(label).set(value)
        return generate_latest(self._registry)
