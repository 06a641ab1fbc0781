"""Distances as rows for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from hyimg_cli.cli import render
from hyimg_cli.measure.distances import Measured
from hyimg_cli.quality.lpips import StoredPair
from hyimg_cli.quality.metrics import Metric

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


def show(rows: Sequence[Sequence[str]]) -> None:
    """Rows on stdout, in columns as wide as what they hold: no number is cut."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        cells = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        # A letter of some scripts takes two cells.
        render.line("  ".join([name + " " * (widths[0] - cell_len(name)), *cells]))


def distances(
    results: Sequence[Measured], metrics: Sequence[Metric], summary: Mapping[str, Any]
) -> list[list[str]]:
    """A row for each pair, then mean and worst of all; of a video the mean (min to max)."""
    rows = [["pair", *(TITLES[metric.name] for metric in metrics)]]
    for measured in results:
        is_video = measured.pair.kind == "video"
        name = measured.pair.name + (f" ({measured.frames} frames)" if is_video else "")
        rows.append([name, *(_cells(m, measured.values[m.name], is_video) for m in metrics)])
    for row in ("mean", "worst") if len(results) > 1 else ():
        cells = (_cell(metric, summary[metric.name][row]) for metric in metrics)
        rows.append([f"{row} of {len(results)}", *cells])
    return rows


def self_test(pairs: Sequence[StoredPair]) -> list[list[str]]:
    """Stored and found distances side by side."""
    rows = [["pair", "stored", "found", ""]]
    for pair in pairs:
        verdict = "agrees" if pair.agrees else "DIFFERS"
        rows.append([pair.name, f"{pair.stored:.5f}", f"{pair.found:.5f}", verdict])
    return rows


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
