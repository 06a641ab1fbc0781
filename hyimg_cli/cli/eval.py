"""`hyimg eval`: distances between pictures or videos; `measure.eval` measures."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyimg_cli.cli import eval_options as e
from hyimg_cli.cli import eval_table, packaged, render
from hyimg_cli.cli import options as o
from hyimg_cli.cli.bench import run_comparison
from hyimg_cli.errors import Interrupted, SourceImageError, UsageError
from hyimg_cli.measure.distances import measured
from hyimg_cli.measure.eval import LIMITED_BY, breaches, summary, to_record, write_csv
from hyimg_cli.measure.pairs import VARIANTS, Pairing, find_pairs, newest_bench
from hyimg_cli.quality.backbones import NETS
from hyimg_cli.quality.metrics import PIXEL_METRICS, SHARES
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.options import KeepOutside

if TYPE_CHECKING:
    from hyimg_cli.quality.lpips import Lpips

# What is no distance: an edit outside itself.
_OUTSIDE = "outside"
_OF_OUTSIDE = o.settings_for("eval")
_OF_DISTANCES = ("min_psnr", "min_ssim", "max_lpips", "max_abs", "weights", "csv")
# What is measured without paths.
_COMPARISON = "kv-reuse"


@o.takes(*_OF_OUTSIDE)
def evaluate(
    ctx: typer.Context,
    metric: e.MetricChoice,
    a: e.SideA = None,
    b: e.SideB = None,
    net: e.Net = "alex",
    weights: e.WeightsFile = None,
    self_test: e.SelfTest = False,
    allow_unpaired: e.AllowUnpaired = False,
    as_video: e.AsVideo = False,
    min_psnr: e.MinPsnr = None,
    min_ssim: e.MinSsim = None,
    max_lpips: e.MaxLpips = None,
    max_abs: e.MaxAbs = None,
    csv: e.CsvFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure how far pictures or videos are apart: two files, folders, runs, or a list of pairs.

    Without paths: KV reuse against recompute, from the newest bench folder here.
    """
    if metric not in e.METRICS:
        hint = f"allowed: {', '.join(e.METRICS)}"
        raise UsageError(f"{metric!r} is not a metric", hint=hint)
    # Before 0.29 typer leaves paths as words in a context.
    given = ctx.params | {"a": a, "b": b, "weights": weights, "csv": csv}
    # NOTE: readers of pictures catch every Exception, so the signal stays a KeyboardInterrupt until
    # it is out of them.
    try:
        _refuse_idle(ctx.params)
        if metric == _OUTSIDE:
            raise typer.Exit(_outside(given))
        raise typer.Exit(_self_test(given) if self_test else _run(given))
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None


def _refuse_idle(given: Mapping[str, Any]) -> None:
    """Raise UsageError for what is given and would not be looked at: a gate, most of all."""
    metric = given["metric"]
    others = _OF_DISTANCES if metric == _OUTSIDE else _OF_OUTSIDE
    idle = [f"--{name}".replace("_", "-") for name in others if given[name] is not None]
    if idle:
        hint = f"it goes with {'a distance' if metric == _OUTSIDE else 'hyimg eval outside'}"
        raise UsageError(f"{metric} does not take {', '.join(idle)}", hint=hint)


def _outside(given: Mapping[str, Any]) -> int:
    """Show what an edit changed outside itself; 1 where a gate says no."""
    from hyimg_cli.measure.outside import lines, outside_of

    if given["a"] is None or given["b"] is None:
        raise UsageError("outside compares two pictures", hint="hyimg eval outside SOURCE RESULT")
    settings = settle({name: given[name] for name in _OF_OUTSIDE}, {}, {})
    if given["max_spill"] is not None and not given["region"]:
        hint = "give --region, or leave --max-spill out"
        raise UsageError("--max-spill judges what lies outside a region", hint=hint)
    asked = {name: settings[name].value for name in _OF_OUTSIDE}
    outside = KeepOutside(**{name: value for name, value in asked.items() if value is not None})
    try:
        record = outside_of(given["a"], given["b"], outside)
    except SourceImageError as error:
        # Its hint is for those who wrote a manifest.
        hint = "" if error.code == "source.missing" else error.hint
        raise UsageError(error.what, where=error.where, hint=hint, code=error.code) from None
    if given["as_json"]:
        render.json_line({"a": str(given["a"]), "b": str(given["b"])} | record)
    else:
        for name, text in lines(record):
            render.line(f"{name}: {text}")
    for breach in record["gates"]:
        render.note(f"gate: {breach}")
    return 1 if record["gates"] else 0


def _run(given: Mapping[str, Any]) -> int:
    """Measure and show every pair; the exit code."""
    asked = {name: given[option] for name, option in LIMITED_BY.items()}
    limits = {name: limit for name, limit in asked.items() if limit is not None}
    pairing = _pairing(given)
    every = ("psnr", "ssim", "lpips", "max_abs", *SHARES)
    names = dict.fromkeys((*(every if given["metric"] == "all" else [given["metric"]]), *limits))
    loaded = _lpips(given) if "lpips" in names else None
    known = {**PIXEL_METRICS, **({"lpips": loaded.metric} if loaded else {})}
    metrics = [known[name] for name in names]
    if pairing.unpaired:
        render.note(f"left out: {pairing.unpaired}")
    results = list(measured(pairing.pairs, metrics))
    records = [to_record(result, metrics) for result in results]
    if given["csv"] is not None:
        write_csv(given["csv"], records)
    totals, title = summary(results, metrics), loaded.title if loaded else None
    if given["as_json"]:
        for entry in (*records, {"summary": totals, "lpips": title}):
            render.json_line(entry)
    else:
        eval_table.show(eval_table.distances(results, metrics, totals))
        if title is not None:
            render.note(title)
    for result in results:
        for text in result.notes:
            render.note(f"{result.pair.name}: {text}")
    failed = list(breaches(results, metrics, limits))
    for breach in failed:
        render.note(f"gate: {breach}")
    return 1 if failed else 0


def _pairing(given: Mapping[str, Any]) -> Pairing:
    """The pairs asked for, or those of the newest bench."""
    a, b = given["a"], given["b"]
    if a is None:
        bench = newest_bench(Path(), _COMPARISON) or _bench_now()
        render.note(f"A against B of {bench}")
        a, b = (bench / name for name in VARIANTS)
    rule = {name: given[name] for name in ("allow_unpaired", "as_video")}
    return find_pairs(a, b, **rule)


def _bench_now() -> Path:
    """Run the packaged scenario and give its folder."""
    from hyimg_cli.measure.bench.scenario import read_scenario

    scenario, folder = read_scenario(_COMPARISON), Path("runs") / f"bench-{_COMPARISON}"
    manifest = packaged.read(str(scenario.manifest))
    # Each variant warms up once for every number of steps.
    count = 2 * len(manifest.lines) * len(scenario.steps) * (scenario.repeats + 1)
    steps = ", ".join(map(str, scenario.steps))
    render.note(
        f"no bench folder here: running hyimg bench --compare {_COMPARISON} first, into {folder}: "
        f"over {count} pictures of {steps} steps by the embedded model, about a minute on two "
        "cores. To measure pictures that are there: hyimg eval METRIC A B"
    )
    run_comparison(
        scenario,
        manifest,
        {},
        folder=folder,
        weights=None,
        command=f"hyimg bench --compare {_COMPARISON}",
        is_quiet=False,
    )
    return folder


def _lpips(given: Mapping[str, Any]) -> "Lpips":
    """The metric that the flags name. Imported here: `--help` must not wait for torch."""
    from hyimg_cli.quality.lpips import Lpips

    if given["net"] not in NETS:
        raise UsageError(f"--net {given['net']!r} is not known", hint=f"allowed: {', '.join(NETS)}")
    return Lpips.load(given["net"], given["weights"])


def _self_test(given: Mapping[str, Any]) -> int:
    """Measure the stored pairs; 1 where one is not at its stored distance."""
    if given["metric"] not in ("lpips", "all"):
        raise UsageError("--self-test is of lpips", hint="hyimg eval lpips --self-test")
    loaded = _lpips(given)
    pairs = loaded.self_test()
    if given["as_json"]:
        for pair in pairs:
            entry = {"name": pair.name, "stored": pair.stored, "found": pair.found}
            render.json_line(entry | {"agrees": pair.agrees})
    else:
        eval_table.show(eval_table.self_test(pairs))
    render.note(loaded.title)
    return 0 if all(pair.agrees for pair in pairs) else 1
