"""`hyimg eval`: distances between pictures or videos; `measure.eval` measures."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyimg_cli.cli import eval_options as e
from hyimg_cli.cli import eval_table, packaged, render
from hyimg_cli.cli import options as o
from hyimg_cli.cli.bench import carried_out
from hyimg_cli.errors import Interrupted, UsageError
from hyimg_cli.measure.eval.benches import VARIANTS, newest_bench
from hyimg_cli.measure.eval.gates import breaches, given_gates
from hyimg_cli.measure.eval.measure import (
    MEASURED_BY,
    Measured,
    Metric,
    chosen_metrics,
    measured,
)
from hyimg_cli.measure.eval.pairs import Pairing, PairingRule, find_pairs, unpaired_text
from hyimg_cli.measure.eval.records import summary, to_record, write_csv
from hyimg_cli.quality.backbones import NETS

if TYPE_CHECKING:
    from hyimg_cli.quality.lpips import Lpips


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
    if metric not in MEASURED_BY:
        hint = f"allowed: {', '.join(MEASURED_BY)}"
        raise UsageError(f"{metric!r} is not a metric", hint=hint)
    # NOTE: readers of pictures catch every Exception, so the signal stays a KeyboardInterrupt until
    # it is out of them.
    try:
        raise typer.Exit(_self_test(ctx.params) if self_test else _carry_out(ctx.params))
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None


def _carry_out(given: Mapping[str, Any]) -> int:
    """Measures and shows every pair; the exit code."""
    limits = ("min_psnr", "min_ssim", "max_lpips", "max_abs")
    gates = given_gates(**{name: given[name] for name in limits})
    pairing = _pairing(given["a"], given["b"], _rule(given))
    names = (*MEASURED_BY[given["metric"]], *(gate.metric for gate in gates))
    loaded = _lpips(given) if "lpips" in names else None
    chosen = chosen_metrics(names, loaded.distance if loaded else None)
    if text := unpaired_text(pairing):
        render.note(f"left out: {text}")
    results = list(measured(pairing.pairs, chosen))
    if given["csv"] is not None:
        write_csv(given["csv"], results)
    _show(results, chosen, title=loaded.title if loaded else None, as_json=given["as_json"])
    failed = list(breaches(results, gates))
    for breach in failed:
        render.note(f"gate: {breach}")
    return 1 if failed else 0


def _show(
    results: Sequence[Measured], chosen: Sequence[Metric], *, title: str | None, as_json: bool
) -> None:
    """Every pair and the summary, then how LPIPS was measured and what reading changed."""
    totals = summary(results, chosen)
    if as_json:
        for entry in map(to_record, results):
            render.json_line(entry)
        render.json_line({"summary": totals, "lpips": title})
    else:
        eval_table.show(eval_table.distances(results, chosen, totals))
        if title is not None:
            render.note(title)
    for result in results:
        for text in result.notes:
            render.note(f"{result.pair.name}: {text}")


def _rule(given: Mapping[str, Any]) -> PairingRule:
    return PairingRule(given["allow_unpaired"], given["as_video"])


def _pairing(a: Path | None, b: Path | None, rule: PairingRule) -> Pairing:
    """The pairs asked for, or those of the newest bench."""
    if a is not None:
        return find_pairs(a, b, rule)
    bench = newest_bench(Path()) or _bench_now()
    render.note(f"A against B of {bench}")
    a, b = (bench / name for name in VARIANTS)
    return find_pairs(a, b, rule)


def _bench_now() -> Path:
    """Runs the packaged kv-reuse scenario and gives its folder."""
    from hyimg_cli.measure.bench.scenario import read_scenario

    scenario, folder = read_scenario("kv-reuse"), Path("runs") / "bench-kv-reuse"
    render.note("no bench folder here: comparing KV reuse with recompute")
    carried_out(
        scenario,
        packaged.read(str(scenario.manifest)),
        {},
        folder=folder,
        weights=None,
        command="hyimg bench --compare kv-reuse",
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
    """Measures the stored pairs; 1 where one is not at its stored distance."""
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
