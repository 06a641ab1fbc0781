"""Whole requests on one network: alone, then several together."""

from collections.abc import Sequence
from dataclasses import replace

from workload import Scale, Workload

from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from shapes.cases import Subject
from shapes.requests import Requests, Served, affordable, plan_of, serve
from shapes.rows import graphs_of
from shapes.run import Run, said
from shapes.timing import let_go


def names(scale: Scale) -> tuple[str, ...]:
    """Of everything here, in the order in which it runs."""
    return tuple(requests.name for requests in plan_of(scale))


class Serving:
    """One network, and the requests that it has served."""

    def __init__(self, model: HunyuanImage3, load: Workload, subject: Subject, run: Run) -> None:
        self._load, self._run = load, run
        self._form, self._kept = subject.form, run.kept
        # Captured once: later requests find the graphs of earlier ones.
        graphs = graphs_of(model.network, subject.form)
        self._by_graphs = HunyuanImage3(model.network, load.prompter, graphs=graphs)
        self._plain = model
        self._done: list[Served] = []

    def all(self, wanted: Sequence[str]) -> None:
        """Those that are wanted."""
        for requests in plan_of(self._load.scale):
            if requests.name in wanted:
                self._serve(requests)

    def _serve(self, requests: Requests) -> None:
        if not self._run.has_time:
            return self._kept.leave_out(requests.name, self._form, "out of time")
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
