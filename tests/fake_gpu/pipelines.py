"""Jobs through the product's own pipelines on the fake GPU; their events mark the stages.

What happens up to an event belongs to the stage that the event ends. A pipeline's threads work in
turn, since torch's modes belong to a thread.
"""

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from fake_gpu.trace import Stages

from hyimg_cli.memory.footprint import Need
from hyimg_cli.pipelines.pipeline import Pipeline
from hyimg_cli.pipelines.queue import Ticket, TicketQueue
from hyimg_cli.pipelines.request import Lost, Request
from hyimg_cli.spec.events import ModelLoaded, Progress, PromptsReady


def planned(needs: Mapping[str, Need]) -> dict[str, int]:
    """What a plan counts by moment, without its margin for what no tensor holds."""
    return {name: need.weights + need.work for name, need in needs.items()}


def run(
    stages: Stages,
    pipeline: Pipeline[Any, Any, Any],
    model: str,
    jobs: list[Any],
    *,
    prefix: str = "",
    expected: list[Any] | None = None,
) -> None:
    """Load the model and make the jobs, together as far as the pipeline does.

    It is loaded for the jobs that are `expected`, by default these. Each stage is noted once, for
    the first job that ends it, under `prefix` and its name. Raises the error of a lost job.
    """
    stages.gpu.forget()
    for event in _events(pipeline, model, jobs, expected or jobs):
        if isinstance(event, Lost):
            raise event.error
        name = _ended(event)
        if name is not None and f"{prefix}{name}" not in stages.trace.stages:
            gc.collect()
            stages.end(f"{prefix}{name}")


def _events(pipeline: Any, model: str, jobs: list[Any], expected: list[Any]) -> Iterator[Any]:
    yield from pipeline.use(model, expected, None)
    yield from pipeline.prepare(jobs, None)
    told = deque[Any]()
    tickets = [Ticket(job, tell=told.append) for job in jobs]
    for _ in pipeline.work(TicketQueue(tickets, is_whole=True)):
        yield told.popleft()


def _ended(event: Any) -> str | None:
    """The stage that ends with an event."""
    match event:
        case PromptsReady(what=what):
            return f"encode {what}"
        case ModelLoaded():
            return "load"
        case Progress(phase="denoise", done=step):
            return f"step {step}" if step else "begin"
        case Progress(phase="think", done=step):
            return f"token {step}" if step else "prefill"
        case Progress(phase="decode_latents"):
            return "leave"  # what only steps need is let go before
        case Request():
            return "decode"
    return None
