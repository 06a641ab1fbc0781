"""Estimate how long the runs of a comparison take.

By an earlier bench of the same jobs, else by the rates of earlier runs, as `hyimg plan` does; then
by the runs that have ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.runner import cards
from hyimg_cli.journal.provenance import hardware
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.measure.bench.record import job_facts
from hyimg_cli.measure.bench.runs import RunResult
from hyimg_cli.measure.bench.scenario import LOAD, START, Lifetime, Scenario
from hyimg_cli.memory.footprint import tokens_of
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob, Job
from hyimg_cli.spec.units import counted, time_text


@dataclass(frozen=True)
class RunTime:
    """Seconds of one run, and the part of them that grows with the number of steps."""

    steps: int
    wall_s: float
    denoise_s: float
    is_estimate: bool = True

    def at(self, steps: int) -> float:
        """Return the seconds of the same run with this number of steps."""
        return self.wall_s + (steps / self.steps - 1) * self.denoise_s


@dataclass
class TimeLeft:
    """The runs ahead, in order, by label and steps, and the times of known runs of each label."""

    ahead: list[tuple[str, int]]
    known: dict[str, list[RunTime]]
    source: str = ""

    def end_run(self, lifetime: Lifetime, result: RunResult) -> None:
        """Count the first of the runs ahead as done; its time replaces estimates for its label.

        Texts and controls of variants that run in processes are made in a session; its time counts
        only until another is known.
        """
        label, steps = self.ahead.pop(0)
        self.source = ""
        if self.known and (lifetime == "session") != (result.phases_s[START] == 0):
            return
        # A session's model stays loaded for its later runs.
        wall_s = result.wall_s - (result.phases_s[LOAD] if lifetime == "session" else 0.0)
        own = [one for one in self.known.get(label, ()) if not one.is_estimate]
        others = [one for one in own if one.steps != steps]
        self.known[label] = [*others, RunTime(steps, wall_s, result.denoise_s, is_estimate=False)]

    @property
    def seconds(self) -> float | None:
        """Return the seconds of all runs ahead; None while no run's time is known."""
        return sum(self._run_s(*run) for run in self.ahead) if self.known else None

    def __str__(self) -> str:
        if self.seconds is None:
            return "time unknown until the first run ends"
        return f"about {time_text(self.seconds)}{self.source or ' left'}"

    def _run_s(self, label: str, steps: int) -> float:
        """Estimate a run; an untried variant takes as long as the slowest of the others."""
        of_label = self.known.get(label)
        every = [of_label] if of_label else self.known.values()
        nearest = (min(runs, key=lambda one: abs(one.steps - steps)) for runs in every)
        return max(one.at(steps) for one in nearest)


def of_bench(
    earlier: Mapping[str, Any], scenario: Scenario, jobs: Sequence[Job]
) -> TimeLeft | None:
    """Return the times in an earlier bench.json; None if it has other jobs or another machine."""
    machine = earlier["environment"]
    then = earlier["name"], earlier["jobs"], machine["model_fingerprint"], machine["hardware"]
    now = scenario.name, [*map(job_facts, jobs)], registry.fingerprint(jobs[0].model), hardware()
    known: dict[str, list[RunTime]] = {}
    for timing in earlier["timings"] if then == now else ():
        for label, side in zip(timing["pair"], "ab", strict=True):
            phases = timing[side]["phases_s"]
            denoise_s = sum(phases[name]["median"] for name in ("denoise_first", "denoise_rest"))
            found = RunTime(timing["steps"], timing[side]["wall_s"]["median"], denoise_s)
            known.setdefault(label, []).append(found)
    is_whole = known.keys() >= set(scenario.labels)
    return TimeLeft([], known, ", as long as the earlier bench here") if is_whole else None


def of_plan(scenario: Scenario, jobs_of: Sequence[Sequence[Job]], config: RunConfig) -> TimeLeft:
    """Return the estimate of `hyimg plan` for each variant's jobs; empty without rates."""
    known, runs = {}, 0
    for variant, jobs in zip(scenario.variants, jobs_of, strict=True):
        plan = make_plan(jobs, cards(config.model.revision))
        eta = Eta(plan, config, KeptRates(config).read(plan))
        if eta.unknown:
            return TimeLeft([], {})
        stages, runs = eta.stages_s, eta.runs
        loads = {"session": 0, "process": 1, "process-per-job": len(jobs)}[variant.lifetime]
        denoise_s = stages["denoise"]
        if not variant.keeps_kv:
            # Each step computes the prefix too; the text is a small part of it.
            pictures = (job for job in jobs if isinstance(job, ImageJob))
            tokens = [tokens_of(job, config.model.revision, 0) for job in pictures]
            prefix_rows = sum(one.branches * one.positive for one in tokens)
            denoise_s *= 1 + prefix_rows / sum(one.branches * one.step_rows for one in tokens)
        wall_s = sum(stages.values()) - stages["denoise"] + (loads - 1) * stages["load"]
        known[variant.label] = [RunTime(scenario.main_steps, wall_s + denoise_s, denoise_s)]
    return TimeLeft([], known, f", from {counted(runs, 'earlier run')} of the model")
