"""`hyimg eval`: distances between pictures or videos; `measure.distances` measures."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len

from hyimg_cli.cli import options as o
from hyimg_cli.cli import packaged, render
from hyimg_cli.cli.bench import run_comparison
from hyimg_cli.cli.completion import among
from hyimg_cli.cli.eval_scores import show_scores
from hyimg_cli.cli.progress import stoppable
from hyimg_cli.errors import SourceImageError, UsageError
from hyimg_cli.manifest.mask_folder import MaskFolder, folder_in, with_mask
from hyimg_cli.measure import distances
from hyimg_cli.measure.pairs import bench_sides, find_pairs, newest_bench
from hyimg_cli.quality.backbones import NETS
from hyimg_cli.quality.metrics import PIXEL_METRICS, SHARES, Metric
from hyimg_cli.settings.config import settle
from hyimg_cli.spec.options import KeepOutside

if TYPE_CHECKING:
    from hyimg_cli.quality.lpips import Lpips

# Not a distance: it measures what an edit changed outside its region.
_OUTSIDE = "outside"
# Nor this: it compares the scores of two runs.
_SCORES = "scores"
_OF_SCORES = ("by", "page")
_OF_OUTSIDE = o.settings_for("eval")
_OF_DISTANCES = ("min_psnr", "min_ssim", "max_lpips", "max_abs", "weights", "clip")
# Measured if no paths are given.
_COMPARISON = "kv-reuse"
_TITLES = {
    "psnr": "PSNR dB ↑",
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
    "cosine": "cosine ↑",
    "clip": "CLIP cosine ↑",
    "max_abs": "max |diff| ↓",
    "equal_share": "equal",
    "within_5": "≤ 5",
    "within_10": "≤ 10",
    "within_20": "≤ 20",
    "within_50": "≤ 50",
}
_compare_option = partial(o.option, panel="What is compared")
_compare_switch = partial(_compare_option, default=False)
_gate_option = partial(o.option, panel="Gates (exit code 1)")
METRICS = ("lpips", "psnr", "ssim", "cosine", "all", "outside", "scores")
# Names for several metrics at once; `clip` only with a checkpoint.
_SEVERAL = {
    "all": ("psnr", "ssim", "lpips", "cosine", "clip", "max_abs", *SHARES),
    "cosine": ("cosine", "clip"),
}


@o.takes(*_OF_OUTSIDE)
def evaluate(
    ctx: typer.Context,
    metric: str = typer.Argument(
        metavar="|".join(METRICS),
        autocompletion=among(METRICS),
        help="Distance to measure; outside measures what the edit B changed in its source A; "
        "scores compares two scored runs, or shows the mean of one.",
    ),
    a: Path | None = typer.Argument(
        None,
        metavar="A",
        show_default=False,
        help="Picture, video, folder or run. Default: the variants of the newest bench folder.",
    ),
    b: Path | None = typer.Argument(
        None, metavar="B", show_default=False, help="What to compare A with."
    ),
    net: str = _compare_option(
        "LPIPS network: alex (default), squeeze or vgg.",
        default="alex",
        autocompletion=among(NETS),
    ),
    weights: Path | None = _compare_option(
        "LPIPS backbone weights, such as torchvision's alexnet-owt-7be5be79.pth."
    ),
    clip: Path | None = _compare_option(
        "Also compare embeddings by the CLIP checkpoint in this folder (cosine, all)."
    ),
    allow_unpaired: bool = _compare_switch("Skip files without a counterpart.", "--allow-unpaired"),
    as_video: bool = _compare_switch("Treat A and B as folders of video frames.", "--as-video"),
    min_psnr: float | None = _gate_option("Minimum PSNR of every picture and frame, in dB."),
    min_ssim: float | None = _gate_option("Minimum SSIM of every picture and frame."),
    max_lpips: float | None = _gate_option("Maximum LPIPS of any picture or frame."),
    max_abs: int | None = _gate_option("Maximum difference of any value, in levels (0 to 255)."),
    by: list[str] | None = _compare_option(
        "Scorer to compare by (scores). Repeatable. Default: those of both runs.",
        metavar="<scorer>",
    ),
    page: Path | None = _compare_option(
        "Write the comparison as an HTML page (scores).", parser=o.folder, metavar="<path>"
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Measure the distance between pictures or videos: two files, folders or runs.

    Without paths, compares KV reuse with each kind of recompute, from the newest bench folder.
    Scores have exit code 1 if one is missing, or the judge changed.
    """
    if metric not in METRICS:
        hint = f"allowed: {', '.join(METRICS)}"
        if metric == _COMPARISON:
            hint = f"run hyimg bench --compare {metric}, then hyimg eval lpips"
        elif a is not None and b is None:
            hint = f"run {shlex.join(['hyimg', 'eval', 'lpips', metric, str(a)])}; {hint}"
        raise UsageError(f"{metric!r} is not a metric", hint=hint)
    # Refuse options that would have no effect, gates above all.
    own = {_OUTSIDE: _OF_OUTSIDE, _SCORES: _OF_SCORES}.get(metric, _OF_DISTANCES)
    for names, owner in (
        (_OF_DISTANCES, "a distance"),
        (_OF_OUTSIDE, "hyimg eval outside"),
        (_OF_SCORES, "hyimg eval scores"),
    ):
        idle = [f"--{name}".replace("_", "-") for name in names if ctx.params[name] is not None]
        if names is not own and idle:
            what = f"{metric} does not take {', '.join(idle)}"
            raise UsageError(what, hint=f"it belongs to {owner}")
    run = {_OUTSIDE: _outside, _SCORES: _scores}.get(metric, _run)
    with stoppable():
        try:
            raise typer.Exit(run(ctx.params))
        except SourceImageError as error:
            # Its hint is about manifests.
            hint = "" if error.code == "source.missing" else error.hint
            raise UsageError(error.what, where=error.where, hint=hint, code=error.code) from None


def _outside(given: Mapping[str, Any]) -> int:
    """Show what an edit changed outside its region; return 1 if a gate fails."""
    from hyimg_cli.measure.outside import lines, outside_of

    if given["a"] is None or given["b"] is None:
        raise UsageError("outside compares two pictures", hint="hyimg eval outside SOURCE RESULT")
    settings = settle({name: given[name] for name in _OF_OUTSIDE}, {}, {})
    if given["max_spill"] is not None and not given["region"]:
        hint = "add --region, or remove --max-spill"
        raise UsageError("--max-spill needs a region", hint=hint)
    values = {name: settings[name].value for name in _OF_OUTSIDE}
    if folder := folder_in(values["region"]):
        mask = MaskFolder(folder).needed_for(str(given["a"]))
        values["region"] = with_mask(values["region"], mask)
    outside = KeepOutside(**values)
    record = outside_of(given["a"], given["b"], outside)
    if given["as_json"]:
        render.json_line({"a": str(given["a"]), "b": str(given["b"])} | record)
    else:
        for name, text in lines(record):
            render.line(f"{name}: {text}")
    for breach in record["gates"]:
        render.note(f"gate: {breach}")
    return 1 if record["gates"] else 0


def _scores(given: Mapping[str, Any]) -> int:
    """Show scores; return 1 if one is missing, or a judge changed."""
    return show_scores(
        given["a"],
        given["b"],
        given["by"] or (),
        given["page"],
        allow_unpaired=given["allow_unpaired"],
        as_json=given["as_json"],
    )


def _run(given: Mapping[str, Any]) -> int:
    """Measure and show every pair; return the exit code."""
    metric = given["metric"]
    asked = {name: given[option] for name, option in distances.LIMITED_BY.items()}
    limits = {name: limit for name, limit in asked.items() if limit is not None}
    sides = [("", given["a"], given["b"])]
    if given["a"] is None:
        bench = newest_bench(Path(), _COMPARISON) or _bench_now()
        sides = bench_sides(bench)
        render.note(f"{', '.join(title for title, _, _ in sides)}: pictures of {bench}")
    rule = {name: given[name] for name in ("allow_unpaired", "as_video")}
    pairings = {title: find_pairs(a, b, **rule) for title, a, b in sides}
    if given["clip"] is not None and metric not in _SEVERAL:
        raise UsageError(f"{metric} does not take --clip", hint="hyimg eval cosine A B")
    names = dict.fromkeys((*_SEVERAL.get(metric, (metric,)), *limits))
    known, lpips = dict(PIXEL_METRICS), None
    if "lpips" in names:
        loaded = _lpips(given)
        known["lpips"], lpips = loaded.metric, loaded.title
    if given["clip"] is not None:
        from hyimg_cli.quality.clip import Clip

        known["clip"] = Clip.load(given["clip"]).metric
    metrics = [known[name] for name in names if name in known]
    for pairing in pairings.values():
        if pairing.unpaired:
            render.note(f"skipped: {pairing.unpaired}")
    results, entries = list[distances.Measured](), list[dict[str, Any]]()
    rows = [["pair", *(_TITLES[metric.name] for metric in metrics)]]
    for title, pairing in pairings.items():
        found = list(distances.measured(pairing.pairs, metrics))
        named = {"comparison": title} if title else {}
        records = [distances.to_record(result, metrics) for result in found]
        totals = distances.summary(found, metrics)
        results += found
        entries += [named | record for record in records]
        entries.append(named | {"summary": totals, "lpips": lpips})
        of_pairs = [_row(record, metrics) for record in records]
        for name in ("mean", "worst") if len(found) > 1 else ():
            cells = [_cell(metric, totals[metric.name][name]) for metric in metrics]
            of_pairs.append([f"{name} of {len(found)}", *cells])
        if title:  # each comparison in one row
            of_pairs = [[f"{title}, {of_pairs[-1][0]}", *of_pairs[-1][1:]]]
        rows += of_pairs
    if given["as_json"]:
        for entry in entries:
            render.json_line(entry)
    else:
        _show_table(rows)
        if lpips:
            render.note(lpips)
    for result in results:
        for text in result.notes:
            render.note(f"{result.pair.name}: {text}")
    failed = list(distances.breaches(results, metrics, limits))
    for breach in failed:
        render.note(f"gate: {breach}")
    return 1 if failed else 0


def _bench_now() -> Path:
    """Run the packaged scenario and return its folder."""
    from hyimg_cli.measure.bench.scenario import read_scenario

    scenario, folder = read_scenario(_COMPARISON), Path("runs") / f"bench-{_COMPARISON}"
    render.note(
        f"no bench folder found: running hyimg bench --compare {_COMPARISON} first, into {folder}. "
        "To compare existing pictures: hyimg eval METRIC A B"
    )
    run_comparison(
        scenario,
        packaged.read(str(scenario.manifest)),
        {},
        folder=folder,
        command=f"hyimg bench --compare {_COMPARISON}",
    )
    return folder


def _lpips(given: Mapping[str, Any]) -> "Lpips":
    """Return the metric that the flags name. Imported here, so that `--help` needs no torch."""
    from hyimg_cli.quality.lpips import Lpips

    if given["net"] not in NETS:
        raise UsageError(f"--net {given['net']!r} is not known", hint=f"allowed: {', '.join(NETS)}")
    return Lpips.load(given["net"], given["weights"])


def _show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows on stdout, in columns wide enough for every cell."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        cells = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        # Characters of some scripts are two cells wide.
        render.line("  ".join([name + " " * (widths[0] - cell_len(name)), *cells]))


def _row(record: Mapping[str, Any], metrics: Sequence[Metric]) -> list[str]:
    """Return a pair's name and distances; for a video, each mean with minimum and maximum."""
    is_video = record["kind"] == "video"
    cells = [record["name"] + (f" ({record['frames']} frames)" if is_video else "")]
    for metric in metrics:
        mean, *ends = (
            _cell(metric, record[f"{metric.name}{end}"])
            for end in ("", *(("_min", "_max") if is_video else ()))
        )
        cells.append(f"{mean} ({' to '.join(ends)})" if ends else mean)
    return cells


def _cell(metric: Metric, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if metric.unit == "share":
        # A share just below 1 must not be shown as 100 %.
        return "100 %" if value == 1 else f"{min(value * 100, 99.99):.2f} %"
    if metric.unit:
        return f"{value:{'.2f' if metric.unit == 'dB' else 'g'}}"
    # Nor may a distance just above 0 be shown as 0, or a similarity just below 1 as 1.
    if 0 < value < 0.0001:
        return f"{value:.0e}"
    return f"{min(value, 0.9999) if 0.9999 < value < 1 else value:.4f}"
