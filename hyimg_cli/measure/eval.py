"""Distances held against limits, and as plain records. No model runs."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyimg_cli.files import replace_file, storage_error
from hyimg_cli.measure.distances import Measured
from hyimg_cli.quality.metrics import Metric, number_to_json


@dataclass(frozen=True)
class Gate:
    """A limit of one metric, kept by the worst frame of a video too: the least where `is_floor`,
    else the most that is allowed.
    """

    metric: str
    limit: float
    is_floor: bool

    def breach(self, measured: Measured) -> str:
        """The broken limit of a pair in words; empty where it is kept. NaN keeps none."""
        values = measured.values[self.metric]
        value = min(values) if self.is_floor else max(values)
        if value >= self.limit if self.is_floor else value <= self.limit:
            return ""
        side = "below" if self.is_floor else "above"
        return f"{measured.pair.name}: {self.metric} {value:.4g} is {side} {self.limit:g}"


# By option: the metric that it limits, and whether from below.
_LIMITS = {
    "min_psnr": ("psnr", True),
    "min_ssim": ("ssim", True),
    "max_lpips": ("lpips", False),
    "max_abs": ("max_abs", False),
}


def given_gates(given: Mapping[str, Any]) -> list[Gate]:
    """A gate for each limit among the options given: dB, at most 1, at least 0, levels."""
    gates = [Gate(metric, given[name], floor) for name, (metric, floor) in _LIMITS.items()]
    return [gate for gate in gates if gate.limit is not None]


def breaches(results: Iterable[Measured], gates: Sequence[Gate]) -> Iterator[str]:
    """Every pair and limit that do not go together, in the order of the pairs."""
    found = (gate.breach(measured) for measured in results for gate in gates)
    yield from filter(None, found)


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
    try:
        replace_file(path, text.getvalue().encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise storage_error(error, path.parent) from error
