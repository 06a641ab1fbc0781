"""`hyimg plan`: count what `generate` would do: jobs, steps, time, memory; no torch."""

from functools import partial

import typer

from hyimg_cli.cli import plan_facts as facts
from hyimg_cli.cli import render
from hyimg_cli.cli.plan_facts import Fact
from hyimg_cli.cli.progress import show_remark
from hyimg_cli.cli.request import request_of
from hyimg_cli.cli.shard import remark_unsplit
from hyimg_cli.engine import runner
from hyimg_cli.engine.eta import Eta, KeptRates
from hyimg_cli.engine.forecast import forecast
from hyimg_cli.engine.preparation import preview
from hyimg_cli.errors import MachineError
from hyimg_cli.loading.hub import stays_local
from hyimg_cli.scoring.best_of import first_run
from hyimg_cli.spec.units import bytes_text, counted


def plan(ctx: typer.Context) -> None:
    """Show what generate would do, without loading a model or writing files. Exit code 2 or 3: it
    would not run.
    """
    render.log_to_stderr(ctx.params["verbose"])
    raise typer.Exit(show_plan(ctx))


@stays_local()
def show_plan(ctx: typer.Context) -> int:
    """Print the plan for the remaining jobs and return the exit code; writes no files."""
    given = ctx.params
    style = render.style_of(given)
    render.remarks(remark_unsplit(given["shard"]), style)
    request = first_run(request_of(ctx), with_drafts=True)
    ahead = preview(request, partial(show_remark, style=style))
    assert ahead.rest is not None, "anything else is raised"
    if request.config.candidates.draft_steps:
        picked = request.config.candidates.keep
        said = f"the plan is of the drafts; then {picked} of each line will be drawn in full"
        render.remarks([said], style)
    elif drafts := sum(bool(job.lineage.draft_of) for job in ahead.rest.plan.jobs):
        said = f"{counted(drafts, 'draft')} will find regions; each edit is planned as two crops"
        render.remarks([said], style)
    config, order, rest = request.config, ahead.rest.plan, ahead.rest.resumption
    think = given["assume_think"]
    costs = forecast(order, config, assumed_think=think)
    replicas = runner.replicas_of(order, config)
    rates = KeptRates(config)
    eta = Eta(order, config, rates.read(order))
    render.remarks(rates.take_notes(), style)
    before = f", {len(rest.done):,} already done" if rest.done else ""
    before += f", {len(rest.to_finish):,} to finish again without a model" if rest.to_finish else ""
    too_large = {
        model: f"{bytes_text(fit.available.free)}: {fit.remedy}"
        for model, fit in ahead.too_large.items()
    }
    offloads = {model: fit for model, fit in ahead.fits.items() if fit.takes_offload}
    short = [f"  {model} does not fit into {why}" for model, why in too_large.items()]
    found_facts = [
        *([facts.shard_fact(ahead.preparation.shard)] if ahead.preparation.shard else ()),
        *facts.work_facts(order, costs, think=think),
        Fact("skipped", rest.done, [f"total: {counted(len(order.groups), 'group')}{before}"]),
        Fact("finished_again", [job.custom_id for job in rest.to_finish]),
        Fact("untried", [job.custom_id for job, _ in ahead.rest.untried]),
        facts.time_fact(eta) if order.jobs else Fact("time", None, ["time: nothing left to run"]),
        *facts.memory_facts(order, config),
        Fact(
            "auto_fit",
            {model: fit.config.model.cpu_offload for model, fit in offloads.items()},
            [f"  {model}: {fit.offload}" for model, fit in offloads.items()],
        ),
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
    for fit in ahead.too_large.values():
        render.error(fit.refusal())
    return MachineError.exit_code if too_large else 0
