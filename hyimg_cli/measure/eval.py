"""Distances held against limits, and as plain records. No model runs."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.files import replace_file
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.measure.distances import Measured
from hyimg_cli.quality.metrics import Metric, number_to_json

# The option that limits each metric: from below where higher is nearer.
LIMITED_BY = {"psnr": "min_psnr", "ssim": "min_ssim", "lpips": "max_lpips", "max_abs": "max_abs"}


def breaches(
    results: Iterable[Measured], metrics: Sequence[Metric], limits: Mapping[str, float]
) -> Iterator[str]:
    """Sentences on every pair that does not keep a limit, with its worst frame; NaN keeps none.

    `limits`: by metric, in dB, levels, at least 0 or at most 1.
    """
    limited = [(metric, limits[metric.name]) for metric in metrics if metric.name in limits]
    for measured in results:
        for metric, limit in limited:
            value = metric.worst(measured.values[metric.name])
            side = "below" if metric.higher_is_nearer else "above"
            if not (value >= limit if metric.higher_is_nearer else value <= limit):
                yield f"{measured.pair.name}: {metric.name} {value:.4g} is {side} {limit:g}"


def to_record(measured: Measured, metrics: Sequence[Metric]) -> dict[str, Any]:
    """A pair with its distances by name; of a video the mean, and the extremes of its frames."""
    pair = measured.pair
    record: dict[str, Any] = {
        "name": pair.name,
        "a": str(pair.a),
        "b": str(pair.b),
        "kind": pair.kind,
        "frames": measured.frames,
    }
    for metric in metrics:
        values = measured.values[metric.name]
        record[metric.name] = number_to_json(metric.mean(values))
        if pair.kind == "video":
            record[f"{metric.name}_max"] = number_to_json(max(values))
            record[f"{metric.name}_min"] = number_to_json(min(values))
    return record | ({"notes": list(measured.notes)} if measured.notes else {})


def summary(results: Sequence[Measured], metrics: Sequence[Metric]) -> dict[str, Any]:
    """Pairs, and for each metric its mean over them and the worst picture or frame of all."""
    entry: dict[str, Any] = {"pairs": len(results)}
    for metric in metrics:
        of_pairs = [measured.values[metric.name] for measured in results]
        mean = metric.mean(metric.mean(values) for values in of_pairs)
        worst = metric.worst(value for values in of_pairs for value in values)
        entry[metric.name] = {"mean": number_to_json(mean), "worst": number_to_json(worst)}
    return entry


def write_csv(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """One row for each record, whole or not at all; notes are left out. Raises StorageError."""
    columns = dict.fromkeys(name for record in records for name in record if name != "notes")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    with disk_errors(path.parent):
        replace_file(path, text.getvalue().encode("utf-8", "backslashreplace"))
