"""Distances as plain records: a JSON object or a CSV row for each pair, and a summary."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyimg_cli.files import replace_file, storage_error
from hyimg_cli.measure.eval.measure import Measured, Metric
from hyimg_cli.quality.metrics import number_to_json


def to_record(measured: Measured) -> dict[str, Any]:
    """A pair with its distances by name; of a video also the largest and smallest of a frame."""
    pair = measured.pair
    record: dict[str, Any] = {
        "name": pair.name,
        "a": str(pair.a),
        "b": str(pair.b),
        "kind": pair.kind,
        "frames": measured.frames,
    }
    for name, spread in measured.values.items():
        record[name] = number_to_json(spread.mean)
        if pair.kind == "video":
            record[f"{name}_max"] = number_to_json(spread.max)
            record[f"{name}_min"] = number_to_json(spread.min)
    return record | ({"notes": list(measured.notes)} if measured.notes else {})


def summary(results: Sequence[Measured], chosen: Sequence[Metric]) -> dict[str, Any]:
    """Pairs, and for each metric its mean over them and the worst picture or frame of all."""
    entry: dict[str, Any] = {"pairs": len(results)}
    for metric in chosen:
        spreads = [measured.values[metric.name] for measured in results]
        worst = (
            min(spread.min for spread in spreads)
            if metric.higher_is_nearer
            else max(spread.max for spread in spreads)
        )
        mean = metric.mean([spread.mean for spread in spreads])
        entry[metric.name] = {"mean": number_to_json(mean), "worst": number_to_json(worst)}
    return entry


def write_csv(path: Path, results: Sequence[Measured]) -> None:
    """One row for each pair, whole or not at all. Raises StorageError."""
    records = [to_record(measured) for measured in results]
    columns = dict.fromkeys(name for record in records for name in record if name != "notes")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    try:
        replace_file(path, text.getvalue().encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise storage_error(error, path.parent) from error
