"""`hyimg bench`: compare variants of the engine on the same jobs."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.completion import among, manifests
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.measure.bench.scenario import Scenario, names, read_scenario
from hyimg_cli.settings.config import Setting

if TYPE_CHECKING:
    from hyimg_cli.manifest.manifest import Manifest

# The name of a comparison that is not a scenario.
DRAFTS = "drafts"
_MODEL_FLAGS = o.settings_for("bench")


@o.takes(*_MODEL_FLAGS)
def bench(
    ctx: typer.Context,
    compare: str = o.option(
        f"Scenario to run: {', '.join([*names(), DRAFTS])}, or a .toml file.",
        default=...,
        metavar="NAME",
        is_basic=True,
        autocompletion=among([*names(), DRAFTS]),
    ),
    manifest: str | None = o.option(
        "Jobs to compare. Default: the scenario's own; drafts needs it.",
        autocompletion=manifests,
        is_basic=True,
    ),
    output_dir: Path | None = o.output("Output folder. Default: runs/bench-NAME.", is_basic=True),
    steps: str | None = o.option("Step counts to measure, for example 1,8,50.", is_basic=True),
    repeats: int | None = o.number("Number of timed runs per variant.", min=1, is_basic=True),
    baseline: Path | None = o.option("Compare with an earlier bench.json."),
    max_regress: str = o.option(
        "Maximum slowdown against the baseline.", default="5%", show_default=True
    ),
    lpips_weights: Path | None = o.option("Backbone weights for LPIPS (alex)."),
    draft_steps: str = o.option(
        "Step counts to try for drafts.", default="6,8,10", show_default=True
    ),
    candidates: int = o.option(
        "Candidates per line, to compare drafts.", default=8, show_default=True, min=2
    ),
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
    help_all: bool = o.HELP_ALL,
) -> None:
    """Compare engine variants: time by phase, picture distance, and a verdict.

    \b
    hyimg bench --compare kv-reuse
    hyimg bench --compare kv-reuse --model ./checkpoint

    Exit code 0: the pictures agree and the time difference is explained. Exit code 1: otherwise.
    """
    flags = {name: ctx.params[name] for name in _MODEL_FLAGS}
    if compare == DRAFTS:
        _compare_drafts(ctx.params, flags)
        return
    from hyimg_cli.measure.bench import record

    scenario = read_scenario(compare)
    scenario = replace(scenario, repeats=repeats) if repeats else scenario
    if steps:
        counts = _step_counts("--steps", steps, "1,8,50")
        main = scenario.main_steps if scenario.main_steps in counts else counts[-1]
        scenario = replace(scenario, steps=counts, main_steps=main)
    earlier = record.read_baseline(baseline) if baseline else None
    most = record.read_share(max_regress)
    folder = output_dir or Path("runs") / f"bench-{scenario.name}"
    # Variants take the model and device from flags or the environment, and no other settings.
    said = (one for name, one in o.settings_of(flags).items() if name in flags)
    entry = run_comparison(
        scenario,
        packaged.read(manifest or str(scenario.manifest)),
        {one.name: one.value for one in said if one.origin in ("flag", "environment")},
        folder=folder,
        weights=lpips_weights,
        command=render.command_line(ctx),
        is_quiet=quiet,
        earlier=earlier,
    )
    worse = list(record.regressions(entry, earlier, most)) if earlier else []
    if earlier and not record.is_same_machine(entry, earlier):
        render.note("the baseline was measured on another machine, so times were not compared")
    if as_json:
        render.json_line({**entry, "regressions": worse})
    else:
        from hyimg_cli.report.comparison import markdown

        render.lines(markdown(entry))
        for sentence in worse:
            render.note(f"worse than the baseline: {sentence}")
        render.note(f"written: {folder}/bench.json, bench.md, report.html, A/, B/")
    raise typer.Exit(1 if worse else entry["verdict"]["exit_code"])


def _step_counts(flag: str, text: str, example: str) -> tuple[int, ...]:
    """Parse distinct step counts from a text such as 1,8,50. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1000 for part in parts):
        what = f"{flag} {text!r} is not a list of whole numbers"
        raise UsageError(what, hint=f"for example {flag} {example}")
    return tuple(dict.fromkeys(map(int, parts)))


def _compare_drafts(given: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Compare picks from drafts with picks from full pictures; exit code 0 either way."""
    steps = _step_counts("--draft-steps", given["draft_steps"], "6,8,10")
    if not given["manifest"]:  # before the imports, which take seconds
        hint = "give a few dozen typical jobs: --manifest jobs.jsonl"
        raise UsageError("drafts can only be compared on your own jobs", hint=hint)
    from hyimg_cli.measure.bench.drafts import compare_drafts, markdown

    settings = o.settings_of(flags) | {"n": Setting("n", given["candidates"], "flag")}
    folder = given["output_dir"] or Path("runs") / f"bench-{DRAFTS}"
    request = RunRequest(packaged.read(given["manifest"]), o.run_config(settings, folder), settings)
    found = compare_drafts(request, steps, render.note_unless(given["quiet"]))
    if given["as_json"]:
        render.json_line(found)
    else:
        render.lines(markdown(found))
        render.note(f"written: {folder}/drafts.json")


def run_comparison(
    scenario: Scenario,
    manifest: "Manifest",
    flags: Mapping[str, Any],
    *,
    folder: Path,
    command: str,
    weights: Path | None = None,
    is_quiet: bool = False,
    earlier: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Run a comparison and write its three files; return the contents of `bench.json`."""
    from hyimg_cli.measure.bench import record
    from hyimg_cli.measure.bench.budget import bench_metrics
    from hyimg_cli.measure.bench.harness import Bench
    from hyimg_cli.measure.pairs import BENCH_JSON

    folder.mkdir(parents=True, exist_ok=True)
    metrics, lpips = bench_metrics(weights)
    benches = [earlier] if earlier else []
    with suppress(UsageError):  # the bench.json that this run will replace
        benches.append(record.read_baseline(folder / BENCH_JSON))
    found = Bench(
        scenario,
        manifest,
        flags,
        folder=folder,
        metrics=metrics,
        tell=render.note_unless(is_quiet),
        earlier=benches,
        cache=o.cache_folder(o.settings_of(flags)),
    ).run()
    return record.write(found, command=command, lpips=lpips, flags=flags)
