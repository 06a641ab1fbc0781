"""`hyimg plan`: count what `generate` would do: jobs, steps, time, memory; no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import typer

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.cli import plan_facts as facts
from hyimg_cli.cli import render
from hyimg_cli.cli.plan_facts import Fact
from hyimg_cli.cli.progress import show_remark
from hyimg_cli.cli.request import request_of
from hyimg_cli.cli.shard import remark_unsplit
from hyimg_cli.engine import runner
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.forecast import forecast
from hyimg_cli.engine.sources import inspect_sources
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.resume import resume
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.memory.available import configured_memory
from hyimg_cli.memory.fit import check_fit
from hyimg_cli.models import registry
from hyimg_cli.scoring.best_of import drafts_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.plan import Plan
from hyimg_cli.spec.units import bytes_text, counted


def plan(ctx: typer.Context) -> None:
    """Show what generate would do, without loading a model or writing files. Exit code 3: a model
    does not fit into the memory that memory_gb sets.
    """
    render.log_to_stderr(ctx.params["verbose"])
    raise typer.Exit(show_plan(ctx.params))


def show_plan(given: Mapping[str, Any]) -> int:
    """Print the plan for the remaining jobs and return the exit code; writes no files."""
    style = render.style_of(given)
    render.remarks(remark_unsplit(given["shard"]), style)
    request = drafts_of(request_of(given))
    config = request.config
    if config.candidates.draft_steps:
        picked = config.candidates.keep
        said = f"the plan is of the drafts; then {picked} of each line will be drawn in full"
        render.remarks([said], style)
    every, invalid = runner.accept(request.manifest, request.settings)
    every, cards = tuple(request.change(every)), runner.cards(config.model.revision)
    if not invalid:  # a faulty line may be of the kind that the setting affects
        render.remarks(runner.remarks(request.settings, every), style)
    store = DiskStore(config.cache.folder, config.cache.budget_bytes)
    render.remarks(registry.check_headers((job.model for job in every), config.model, store), style)
    jobs, shard = request.selection.of(every, config.model.revision)
    found = inspect_sources(jobs, config, lambda it: show_remark(it, style), fetches=True)
    rest = resume(run_folder(config.output.folder), jobs, config, request.policy)
    to_run = [job for job in rest.to_run if not found.error_of(job)]
    order = replace(make_plan(to_run, cards), begun=rest.begun)
    costs, think = (
        forecast(order, config, assumed_think=given["assume_think"]),
        given["assume_think"],
    )
    replicas = runner.replicas_of(order, config)
    too_large = dict(_too_large(order, config, replicas))
    rates = KeptRates(config)
    eta = Eta(order, config, rates.read(order))
    render.remarks(rates.take_notes(), style)
    before = f", {len(rest.done):,} already done" if rest.done else ""
    before += f", {len(rest.to_finish):,} to finish again without a model" if rest.to_finish else ""
    untried = [job.custom_id for job in rest.to_run if found.error_of(job)]
    short = [f"  {model} does not fit into {why}" for model, why in too_large.items()]
    found_facts = [
        *([facts.shard_fact(shard)] if shard else ()),
        *facts.work_facts(order, costs, think=think),
        Fact("skipped", rest.done, [f"total: {counted(len(order.groups), 'group')}{before}"]),
        Fact("finished_again", [job.custom_id for job in rest.to_finish]),
        Fact("untried", untried),
        facts.time_fact(eta) if to_run else Fact("time", None, ["time: nothing left to run"]),
        *facts.memory_facts(order, config),
        Fact("too_large", too_large, short),
        facts.replicas_fact(replicas, config),
        *([facts.expert_fact(order, config, think=think)] if config.model.offloads_experts else ()),
    ]
    if given["as_json"]:
        render.json_line({one.name: one.value for one in found_facts if one.name})
    else:
        for one in found_facts:
            for text in one.lines:
                render.line(text)
    return MachineError.exit_code if too_large else 0


def _too_large(order: Plan, config: RunConfig, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield each model that does not fit into `memory_gb`, with that limit and a remedy."""
    there = configured_memory(config, replicas=replicas)
    if there is None:
        return
    for model in dict.fromkeys(group.model for group in order.groups):
        jobs = order.jobs_of_model(model)
        found = check_fit(model, jobs, config, there)
        if not found.is_enough:
            yield model, f"{bytes_text(there.free)}: {found.remedy}"
