"""Whole requests on one network: alone, then what a run does before several, then several."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from shapes.cases import Subject
from shapes.requests import (
    Requests,
    Served,
    affordable,
    plan_of,
    prewarm_names,
    prewarm_seconds,
    prewarmed,
    serve,
)
from shapes.rows import graphs_of
from shapes.run import Run, said
from shapes.scale import Scale, Workload
from shapes.timing import let_go

_LATE = "out of time"


def names(scale: Scale) -> tuple[str, ...]:
    """Of everything here, in the order in which it runs."""
    alone, together = ([requests.name for requests in some] for some in plan_of(scale))
    return (*alone, *prewarm_names(scale), *together)


class Serving:
    """One network, and the requests that it has served."""

    def __init__(self, model: HunyuanImage3, load: Workload, subject: Subject, run: Run) -> None:
        self._load, self._subject, self._run = load, subject, run
        self._form, self._kept = subject.form, run.kept
        # Captured once: later requests find the graphs of earlier ones.
        self._graphs = graphs_of(model.network, subject.form)
        self._by_graphs = HunyuanImage3(model.network, load.prompter, graphs=self._graphs)
        self._plain = model
        self._done: list[Served] = []

    def all(self, wanted: Sequence[str], folder: Path) -> None:
        """Those that are wanted; `folder` is for a file."""
        alone, together = plan_of(self._load.scale)
        for requests in alone:
            self._tried(requests, wanted)
        if set(prewarm_names(self._load.scale)) & set(wanted):
            self._prewarm(folder)
        for requests in together:
            self._tried(requests, wanted)

    def _tried(self, requests: Requests, wanted: Sequence[str]) -> None:
        if requests.name not in wanted:
            return
        if not self._run.has_time:
            return self._kept.leave_out(requests.name, self._form, _LATE)
        deadline = self._run.deadline
        steps = affordable(requests, self._done, deadline.left_s)
        if steps < requests.steps:
            why = f"time for {steps} of {requests.steps} steps"
            self._kept.leave_out(requests.name, self._form, why)
            if steps < 2:
                return
            requests = replace(requests, steps=steps)
        model = self._by_graphs if requests.uses_graphs else self._plain
        try:
            served = serve(requests, model, self._load, self._form, deadline)
        except Exception as error:
            return self._kept.leave_out(requests.name, self._form, said(error))
        self._done.append(served)
        self._kept.add_requests(served)
        let_go()

    def _prewarm(self, folder: Path) -> None:
        left = list(prewarm_names(self._load.scale))
        why = _LATE
        try:
            needed = prewarm_seconds(self._load.scale, self._done)
            if self._run.has_time and self._run.deadline.left_s > needed:
                steps = prewarmed(self._by_graphs, self._load, self._form, folder)
                for seconds, note in steps:
                    row = self._subject.once(
                        left.pop(0), seconds, note=note, fault=self._graphs.failure
                    )
                    self._kept.add_row(row)
        except Exception as error:
            why = said(error)
        for name in left:
            self._kept.leave_out(name, self._form, why)
        let_go()
