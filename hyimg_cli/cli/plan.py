"""`hyimg plan`: what `generate` would do, in groups, tokens, steps and bytes, without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import typer

from hyimg_cli.batch.cost import Cost, PlanCost
from hyimg_cli.batch.journal import RunFolder
from hyimg_cli.batch.planner import make_plan
from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.run_options import takes_run_options
from hyimg_cli.engine import runner
from hyimg_cli.engine.footprint import Footprint, footprints
from hyimg_cli.engine.forecast import forecast
from hyimg_cli.spec.plan import Plan


@takes_run_options
def plan(ctx: typer.Context) -> None:
    """Show what generate would do, without loading a model or writing anything."""
    render.log_to_stderr(ctx.params["verbose"])
    show_plan(ctx.params)


def show_plan(given: Mapping[str, Any]) -> None:
    """Prints the plan of what is left of a manifest; only reads."""
    render.style_of(given)
    settings = o.settings_of(given)
    manifest = packaged.read(given["manifest"])
    accepted = runner.accept(manifest, settings)
    config = o.run_config(settings, o.output_folder(given, settings, manifest.name))
    jobs = o.selection_of(given).of(accepted.jobs)
    rest = runner.sift(RunFolder(config.output.folder), jobs, config, o.resume_policy_of(given))
    card_of = runner.cards(config.model.revision)
    order = make_plan(rest.to_run, card_of)
    costs = forecast(order, config, assumed_think=given["assume_think"])
    memory = footprints(order, config, card_of, shared_kv_bytes=costs.shared_kv_bytes)
    if given["as_json"]:
        render.json_line(_as_json(order, costs, memory) | {"skipped": rest.done})
    else:
        for text in _lines(costs, memory, skipped=len(rest.done), think=given["assume_think"]):
            render.line(text)


def _as_json(order: Plan, costs: PlanCost, memory: Mapping[str, Footprint]) -> dict[str, Any]:
    groups = [
        {"model": group.model, "size_class": group.size_class}
        | {"custom_ids": [job.custom_id for job in group.jobs]}
        | asdict(group_cost.cost)
        for group, group_cost in zip(order.groups, costs.groups, strict=True)
    ]
    shared = {"shared_kv_bytes": costs.shared_kv_bytes}
    held = {
        "weight_bytes": {model: one.weights for model, one in memory.items()},
        "memory": {model: asdict(one) | {"total": one.total} for model, one in memory.items()},
    }
    return {"groups": groups, "total": asdict(costs.total)} | shared | held


def _lines(
    costs: PlanCost, memory: Mapping[str, Footprint], *, skipped: int, think: int
) -> Iterator[str]:
    """The plan as text: one paragraph for each group, then all together."""
    for number, group in enumerate(costs.groups, 1):
        yield f"group {number}: {group.model}, size {group.size_class}"
        yield from _cost_lines(group.cost)
    before = f", {skipped} done before" if skipped else ""
    yield f"all: {len(costs.groups)} groups{before}"
    yield from _cost_lines(costs.total)
    yield f"  shared between jobs: {_bytes(costs.shared_kv_bytes)} of KV"
    yield f"  estimated: what depends on written text, taken to be {think} tokens a job"
    for model, one in memory.items():
        yield f"  weights of {model}: {_bytes(one.weights)} once loaded"
        parts = f"{_bytes(one.kv)} of KV, about {_bytes(one.activations)} of activations"
        yield f"  memory with {one.together} jobs together: {parts}; {_bytes(one.total)} in all"


def _cost_lines(cost: Cost) -> Iterator[str]:
    saved = cost.prefix_rows_unshared - cost.prefix_rows
    yield f"  {cost.jobs} jobs, {cost.denoise_steps} denoise steps over {cost.denoise_rows} tokens"
    read = f"{cost.ar_prefill_rows} tokens read, {cost.ar_shared_rows} shared with earlier jobs"
    yield f"  text stage: {read}, {cost.think_rows} estimated to be written"
    yield f"  prefixes: {cost.prefix_rows_unshared} tokens, {saved} of them by KV reuse"
    yield f"  source images encoded: {cost.image_encodes}; KV at most {_bytes(cost.kv_bytes_peak)}"


def _bytes(count: int) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
