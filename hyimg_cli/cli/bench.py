"""`hyimg bench`: two variants of the engine on the same jobs, and what sets them apart."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.completion import manifests, scenarios
from hyimg_cli.measure.bench.scenario import Scenario, names, read_scenario

if TYPE_CHECKING:
    from hyimg_cli.manifest.manifest import Manifest

_MODEL_FLAGS = o.settings_for("bench")

Name = Annotated[
    str,
    typer.Option(
        "--compare",
        metavar="NAME",
        autocompletion=scenarios,
        help=f"{', '.join(names())}, or the .toml file of a scenario.",
    ),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        "--manifest",
        autocompletion=manifests,
        help="Jobs to compare on. Default: the scenario's own.",
    ),
]
Out = Annotated[
    Path | None,
    o.output("--output-dir", "Where results go. Default: runs/bench-NAME."),
]
Steps = Annotated[str | None, typer.Option("--steps", help="Denoise steps to time, as 1,8,50.")]
Repeats = Annotated[
    int | None, typer.Option("--repeats", min=1, help="Timed runs of each variant.")
]
Baseline = Annotated[
    Path | None, typer.Option("--baseline", help="An earlier bench.json that must still hold.")
]
MaxRegress = Annotated[
    str, typer.Option("--max-regress", help="How much slower than the baseline is still good.")
]
Weights = Annotated[
    Path | None, typer.Option("--lpips-weights", help="Backbone weights for LPIPS (alex).")
]


@o.takes(*_MODEL_FLAGS)
def bench(
    ctx: typer.Context,
    compare: Name,
    manifest: Jobs = None,
    output_dir: Out = None,
    steps: Steps = None,
    repeats: Repeats = None,
    baseline: Baseline = None,
    max_regress: MaxRegress = "5%",
    lpips_weights: Weights = None,
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare two variants: seconds by phase, pictures, a verdict with reasons.

    Exit code 0 where the pictures agree and the clock is explained, else 1.
    """
    raise typer.Exit(_run(ctx.params, ctx.obj or ()))


def _run(given: Mapping[str, Any], arguments: tuple[str, ...]) -> int:
    from hyimg_cli.measure.bench import baseline

    scenario = _as_asked(read_scenario(given["compare"]), given)
    earlier = baseline.read_baseline(given["baseline"]) if given["baseline"] else None
    most = baseline.read_share(given["max_regress"])
    folder = given["output_dir"] or Path("runs") / f"bench-{scenario.name}"
    entry = run_comparison(
        scenario,
        packaged.read(given["manifest"] or str(scenario.manifest)),
        _model_flags(given),
        folder=folder,
        weights=given["lpips_weights"],
        command=shlex.join(["hyimg", *arguments]),
        is_quiet=given["quiet"],
    )
    worse = list(baseline.regressions(entry, earlier, most)) if earlier else []
    if earlier and not baseline.is_same_machine(entry, earlier):
        render.note("the baseline is of another machine: seconds were not compared")
    _show(entry, worse, folder, as_json=given["as_json"])
    code: int = entry["verdict"]["exit_code"]
    return 1 if worse else code


def run_comparison(
    scenario: Scenario,
    manifest: "Manifest",
    flags: Mapping[str, Any],
    *,
    folder: Path,
    weights: Path | None,
    command: str,
    is_quiet: bool,
) -> Mapping[str, Any]:
    """Run a comparison and write its three files; what `bench.json` holds."""
    from hyimg_cli.measure.bench import record
    from hyimg_cli.measure.bench.budget import bench_metrics
    from hyimg_cli.measure.bench.harness import compare

    folder.mkdir(parents=True, exist_ok=True)
    metrics, lpips = bench_metrics(weights)
    tell = str if is_quiet else render.note
    found = compare(scenario, manifest, flags, folder=folder, metrics=metrics, tell=tell)
    return record.write(found, command=command, lpips=lpips, flags=flags)


def _as_asked(scenario: Scenario, given: Mapping[str, Any]) -> Scenario:
    """The scenario with the user's steps and repetitions."""
    if given["repeats"]:
        scenario = replace(scenario, repeats=given["repeats"])
    if not given["steps"]:
        return scenario
    steps = o.whole_numbers(given["steps"], flag="--steps")
    main = scenario.main_steps if scenario.main_steps in steps else steps[-1]
    return replace(scenario, steps=steps, main_steps=main)


def _model_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Which weights where: flags, else the environment; no other setting reaches a variant."""
    settled = o.settings_of({name: given[name] for name in _MODEL_FLAGS})
    return {
        name: settled[name].value
        for name in _MODEL_FLAGS
        if settled[name].origin in ("flag", "environment")
    }


def _show(entry: Mapping[str, Any], worse: list[str], folder: Path, *, as_json: bool) -> None:
    from hyimg_cli.report.comparison import markdown

    if as_json:
        render.json_line({**entry, "regressions": worse})
        return
    render.lines(markdown(entry))
    for sentence in worse:
        render.note(f"worse than the baseline: {sentence}")
    render.note(f"written: {folder}/bench.json, bench.md, report.html, A/, B/")
