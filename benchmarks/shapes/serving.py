"""Whole requests on one network: alone, then several together."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from workload import Scale, Workload

from hyimg_cli.models.hunyuan_image3.family import HunyuanImage3
from shapes.cases import Subject
from shapes.requests import Served, affordable, plan_of, serve
from shapes.rows import graphs_of
from shapes.run import Run, said
from shapes.timing import let_go


def names(scale: Scale) -> tuple[str, ...]:
    """Return the names of everything here, in the order in which it runs."""
    return tuple(requests.name for requests in plan_of(scale))


def serve_all(
    wanted: Sequence[str], model: HunyuanImage3, load: Workload, subject: Subject, run: Run
) -> None:
    """Run the requests with these names, each as far as time allows."""
    # Captured once: later requests find the graphs of earlier ones.
    graphs = graphs_of(model.network, subject.form)
    by_graphs = HunyuanImage3(model.network, load.prompter, graphs=graphs)
    done: list[Served] = []
    for requests in plan_of(load.scale):
        if requests.name not in wanted:
            continue
        leave_out = partial(run.kept.leave_out, requests.name, subject.form)
        steps = affordable(requests, done, run.deadline.left_s) if run.has_time else 0
        if steps < requests.steps:
            leave_out(f"time for {steps} of {requests.steps} steps" if steps else "out of time")
            if steps < 2:
                continue
        try:
            served = serve(
                replace(requests, steps=steps),
                by_graphs if requests.uses_graphs else model,
                load,
                subject.form,
                run.deadline,
            )
        except Exception as error:
            leave_out(said(error))
            continue
        done.append(served)
        run.kept.add_requests(served)
        let_go()
