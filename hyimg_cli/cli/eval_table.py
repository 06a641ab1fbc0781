"""Distances as a table for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hyimg_cli.measure.distances import Measured
from hyimg_cli.quality.lpips import StoredPair
from hyimg_cli.quality.metrics import Metric
from hyimg_cli.spec.printed import printable

TITLES = {
    "psnr": "PSNR dB ↑",
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
    "max_abs": "max |diff| ↓",
    "equal_share": "equal",
    "within_5": "≤ 5",
    "within_10": "≤ 10",
    "within_20": "≤ 20",
    "within_50": "≤ 50",
}


def show(table: Table) -> None:
    """A table on stdout, never narrower than what it says: no number is cut."""
    console = Console(highlight=False, markup=False, emoji=False)
    wide = console.options.update(width=10_000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)


def distances(
    results: Sequence[Measured], metrics: Sequence[Metric], summary: Mapping[str, Any]
) -> Table:
    """A row for each pair, then mean and worst of all; of a video the mean (min to max)."""
    table = _table("pair", *(TITLES[metric.name] for metric in metrics))
    for measured in results:
        is_video = measured.pair.kind == "video"
        name = measured.pair.name + (f" ({measured.frames} frames)" if is_video else "")
        cells = [_cells(m, measured.values[m.name], is_video) for m in metrics]
        table.add_row(printable(name), *cells)
    if len(results) > 1:
        table.add_section()
        for row in ("mean", "worst"):
            cells = [_cell(metric, summary[metric.name][row]) for metric in metrics]
            table.add_row(f"{row} of {len(results)}", *cells)
    return table


def self_test(pairs: Sequence[StoredPair]) -> Table:
    """Stored and found distances side by side."""
    table = _table("pair", "stored", "found", "")
    for pair in pairs:
        verdict = "agrees" if pair.agrees else "DIFFERS"
        table.add_row(pair.name, f"{pair.stored:.5f}", f"{pair.found:.5f}", verdict)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _cells(metric: Metric, values: Sequence[float], is_video: bool) -> str:
    mean = _cell(metric, metric.mean(values))
    if not is_video:
        return mean
    return f"{mean} ({_cell(metric, min(values))} to {_cell(metric, max(values))})"


def _cell(metric: Metric, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if metric.unit == "share":
        # A share just below 1 must not read as all.
        return "100 %" if value == 1 else f"{min(value * 100, 99.99):.2f} %"
    if metric.unit:
        return f"{value:{'.2f' if metric.unit == 'dB' else 'g'}}"
    # Neither must a distance just above 0, nor a similarity just below 1.
    if 0 < value < 0.0001:
        return f"{value:.0e}"
    return f"{min(value, 0.9999) if 0.9999 < value < 1 else value:.4f}"
