"""How long a plan will take, in words and as JSON; measured first where that is asked for."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from hyimg_cli.cli import render
from hyimg_cli.cli.stopping import stoppable
from hyimg_cli.cli.views import view_of
from hyimg_cli.engine.choice import RunsPlans, refuse_missing_device, session_for
from hyimg_cli.engine.timing.estimate import Estimate, plan_time
from hyimg_cli.engine.timing.left import TimeLeft
from hyimg_cli.engine.timing.machine import Processors, others_now, process_age_s
from hyimg_cli.engine.timing.observed import KeptTimings, RunTiming, conditions, kept_timings
from hyimg_cli.engine.timing.trial import Trial, plans, tried
from hyimg_cli.manifest.cost import PlanCost
from hyimg_cli.spec.events import Event, JobDone
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.run import RunConfig
from hyimg_cli.spec.units import time_text

# What is told of an estimate, and the phases that it is the sum of.
_PARTS = {
    "start and load": ("start", "load"),
    "prewarm": ("prewarm",),
    "prompts": ("embed",),
    "text": ("encode", "prefill", "think"),
    "denoise": ("denoise",),
    "decode and write": ("decode", "rest", "end"),
}


def estimated(
    order: Plan,
    costs: PlanCost,
    config: RunConfig,
    style: render.Style,
    *,
    since: Processors,
    measure: bool,
) -> Estimate:
    """By what earlier runs left, and by what is measured now. `since`: read as the command began.

    Raises MachineError where a device to measure on is not there.
    """
    store = KeptTimings(config)
    now = _measured(order, config, style) if measure and order.jobs else {}
    kept = kept_timings(dict.fromkeys(group.model for group in order.groups), config, store)
    for model, timing in now.items():
        store.keep(conditions(model, config), timing)
        kept[model] = [*kept.get(model, ()), timing]
    render.remarks(store.take_notes(), style)
    others = others_now(since) if any(kept.values()) else 0.0
    return plan_time(order, costs, config, kept, others)


def time_lines(estimate: Estimate) -> Iterator[str]:
    """The estimate, and what it is made of."""
    if estimate.unknown:
        yield "time: unknown; run with --measure"
        return
    if not estimate.parts:
        yield "time: nothing is left to run"
        return
    yield f"time: {time_said(estimate)}"
    told = {
        name: sum(estimate.parts[p].middle for p in of if p in estimate.parts)
        for name, of in _PARTS.items()
    }
    yield "  " + ", ".join(f"{name} {time_text(s)}" for name, s in told.items() if s >= 0.05)
    if estimate.slowdown > 1:
        yield (
            f"  other programs want {estimate.others:.1f} cores of this machine now: without them "
            f"it would be {time_text(estimate.all.middle / estimate.slowdown)}"
        )


def time_said(estimate: Estimate) -> str:
    """`about 4 min 10 s (3 min 40 s to 5 min 2 s), from 3 earlier runs`."""
    of = estimate.all
    spread = f"({time_text(of.low)} to {time_text(of.high)})"
    runs = f"{estimate.runs} earlier run{'' if estimate.runs == 1 else 's'}"
    trials = "a measurement" if estimate.trials == 1 else f"{estimate.trials} measurements"
    sources = [text for text, count in ((trials, estimate.trials), (runs, estimate.runs)) if count]
    return f"about {time_text(of.middle)} {spread}, from {' and '.join(sources)}"


def time_as_json(estimate: Estimate) -> dict[str, Any] | None:
    """Seconds with their bounds, by phase too; None where they are not known."""
    if estimate.unknown:
        return None
    of = estimate.all
    return {
        "seconds": of.middle,
        "low": of.low,
        "high": of.high,
        "runs": estimate.runs,
        "measurements": estimate.trials,
        "others": estimate.others,
        "phases": {name: asdict(one) for name, one in estimate.parts.items()},
    }


def _without_warnings(event: Event) -> Event:
    """A trial's texts are cut short, which nobody need be told."""
    if isinstance(event, JobDone):
        return JobDone(replace(event.outcome, warnings=()))
    return event


def _measured(order: Plan, config: RunConfig, style: render.Style) -> dict[str, RunTiming]:
    """A trial of the plan, shown while it goes; a signal ends it."""
    refuse_missing_device(config)
    found = Trial(time.perf_counter() - process_age_s())
    parts = plans(order, config.batch.max_size)
    of_trial = Plan(tuple(group for part in parts for group in part.groups))
    left = TimeLeft(of_trial, revision=config.model.revision)
    with stoppable() as stopper, view_of(style, left.total, left) as view:

        def opened(alone: RunConfig) -> RunsPlans:
            stopper.session = session_for(alone)
            return stopper.session

        with closing(tried(order, config, opened, found)) as events:
            for event in events:
                view.show(_without_warnings(event))
    return found.timings
