"""The precision budget: how far apart pictures are, row by row, each row a pair of runs.

For scale, the same variant twice is the floor, and another seed is the ceiling.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError
from hyimg_cli.journal.past_run import job_of
from hyimg_cli.measure.bench.runs import RunResult
from hyimg_cli.measure.pairs import run_pairs
from hyimg_cli.media.images import read_image
from hyimg_cli.quality.lpips import Lpips
from hyimg_cli.quality.metrics import PIXEL_METRICS, SHARES, Distance, Metric, distance
from hyimg_cli.quality.metrics import number_to_json as to_json

# "equal": at least this share of the values is equal, and the others are one level off.
EQUAL_SHARE = 0.998
Metrics = Sequence[Metric]


@dataclass(frozen=True)
class DistanceRow:
    """One pair of runs, picture by picture.

    `missing`: jobs without a picture on one side, or with sizes that differ.
    """

    name: str
    distances: Mapping[str, Distance]
    missing: tuple[str, ...] = ()

    def values(self, metric: str) -> list[Any]:
        """Return this metric's value of every picture that is large enough for it."""
        return [one[metric] for one in self.distances.values() if one.get(metric) is not None]

    @property
    def psnr(self) -> float:
        """The PSNR of the worst job; 0 if a job has nothing to compare."""
        return 0.0 if self.missing else min(self.values("psnr"), default=0.0)

    @property
    def is_identical(self) -> bool:
        return self.is_equal and not any(self.values("max_abs"))

    @property
    def is_equal(self) -> bool:
        return not self.missing and len(self.unchanged) == len(self.distances) > 0

    @property
    def unchanged(self) -> list[str]:
        """The names of the pictures that count as equal."""
        levels, shares = self.values("max_abs"), self.values("equal_share")
        by_name = zip(self.distances, levels, shares, strict=True)
        return [name for name, most, share in by_name if most <= 1 and share >= EQUAL_SHARE]

    def to_json(self) -> dict[str, Any]:
        by_job = {
            name: {**{k: to_json(v) for k, v in one.items()}, "lpips": one.get("lpips")}
            for name, one in self.distances.items()
        }
        worst = self.worst() if by_job else {"pictures": 0}
        return {"name": self.name, **worst, "missing": list(self.missing), "by_job": by_job}

    def worst(self) -> dict[str, Any]:
        """Return the worst value of each metric, and the median PSNR."""
        psnrs = self.values("psnr")
        return {
            "pictures": len(self.distances),
            "psnr_min": to_json(min(psnrs)),
            "psnr_median": to_json(statistics.median(psnrs)),
            "ssim_min": min(self.values("ssim"), default=None),
            "lpips_max": max(self.values("lpips"), default=None),
            "cosine_min": min(self.values("cosine"), default=None),
            "max_abs": max(self.values("max_abs")),
            **{share: min(self.values(share)) for share in SHARES},
        }


def row(name: str, one: RunResult, other: RunResult, metrics: Metrics) -> DistanceRow:
    """Measure the distances of two runs' pictures, for the jobs that both were given."""
    given = {o.custom_id for o in one.outcomes} & {o.custom_id for o in other.outcomes}
    found = run_pairs(one.folder, other.folder, by_frame=True)
    distances: dict[str, Distance] = {}
    missing = [name for name in (*found.only_a, *found.only_b) if job_of(name) in given]
    for pair in found.pairs:
        a, b = (read_image(path).pixels for path in (pair.a, pair.b))
        if a.shape == b.shape:
            distances[pair.name] = distance(a, b, metrics)
        else:
            missing.append(pair.name)
    told = {job_of(name) for name in (*distances, *missing)}
    return DistanceRow(name, distances, (*missing, *sorted(given - told)))


def bench_metrics(weights: Path | None) -> tuple[Metrics, str]:
    """Return all metrics, with LPIPS if its weights are installed, and a text about LPIPS.

    The text is its title, or why it is missing. Raises HyimgError for unusable `weights`.
    """
    metrics = tuple(PIXEL_METRICS.values())
    try:
        lpips = Lpips.load(weights=weights)
    except HyimgError as error:
        if weights is not None:
            raise
        return metrics, f"LPIPS was not measured: {error.what}. {error.hint}"
    return (*metrics, lpips.metric), lpips.title
