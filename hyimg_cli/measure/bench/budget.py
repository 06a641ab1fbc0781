"""The precision budget: how far apart pictures are, row by row, each row a pair of runs.

Only beside its neighbours does a distance mean anything: what the same variant does twice is the
floor, what another seed does is the ceiling.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError
from hyimg_cli.measure.bench.runs import RunResult
from hyimg_cli.media.images import read_image
from hyimg_cli.quality.lpips import Lpips
from hyimg_cli.quality.metrics import Distance, Pixels, distance, number_to_json
from hyimg_cli.spec.events import VideoFile

# "equal": one level off in at most this share of the values, and nothing beyond.
EQUAL_SHARE = 0.998
_FRAME = " frame "
Measure = Callable[[Pixels, Pixels], Distance]


@dataclass(frozen=True)
class Row:
    """One pair of runs, job by job. `note` says what a reader must know of it; `missing` are jobs
    that have no picture on one side, or one of another size.
    """

    name: str
    distances: Mapping[str, Distance]
    note: str = ""
    missing: tuple[str, ...] = ()

    @property
    def psnr(self) -> float:
        """That of the job that is furthest apart; 0 where a job has nothing to compare."""
        if self.missing or not self.distances:
            return 0.0
        return min(one.psnr for one in self.distances.values())

    @property
    def is_identical(self) -> bool:
        return self.is_equal and all(one.max_abs == 0 for one in self.distances.values())

    @property
    def is_equal(self) -> bool:
        is_whole = bool(self.distances) and not self.missing
        return is_whole and len(self.unchanged) == len(self.distances)

    @property
    def unchanged(self) -> list[str]:
        """The jobs whose pictures are as good as the same."""
        return [
            name
            for name, one in self.distances.items()
            if one.max_abs <= 1 and one.equal_share >= EQUAL_SHARE
        ]

    def to_json(self) -> dict[str, Any]:
        by_job = {name: one.to_json() for name, one in self.distances.items()}
        worst = self.worst() if by_job else {"pictures": 0}
        missing = list(self.missing)
        return {"name": self.name, "note": self.note, **worst, "missing": missing, "by_job": by_job}

    def worst(self) -> dict[str, Any]:
        """The furthest of all jobs in each measure, and the median PSNR."""
        all_of = list(self.distances.values())
        ssims = [one.ssim for one in all_of if one.ssim is not None]
        lpips = [one.lpips for one in all_of if one.lpips is not None]
        return {
            "pictures": len(all_of),
            "psnr_min": number_to_json(min(one.psnr for one in all_of)),
            "psnr_median": number_to_json(statistics.median(one.psnr for one in all_of)),
            "ssim_min": min(ssims, default=None),
            "lpips_max": max(lpips, default=None),
            "max_abs": max(one.max_abs for one in all_of),
            "equal_share": min(one.equal_share for one in all_of),
            "within_5": min(one.within_5 for one in all_of),
            "within_10": min(one.within_10 for one in all_of),
            "within_20": min(one.within_20 for one in all_of),
            "within_50": min(one.within_50 for one in all_of),
        }


def row(name: str, one: RunResult, other: RunResult, measure: Measure, note: str = "") -> Row:
    """The distances of two runs' pictures, for the jobs that both were given."""
    ours, theirs = pictures(one), pictures(other)
    given = {o.custom_id for o in one.outcomes} & {o.custom_id for o in other.outcomes}
    drawn = [name for name in dict.fromkeys((*ours, *theirs)) if _job_of(name) in given]
    empty = given - {_job_of(name) for name in drawn}
    fit = [n for n in drawn if n in ours and n in theirs and ours[n].shape == theirs[n].shape]
    missing = (*(name for name in drawn if name not in fit), *sorted(empty))
    return Row(name, {n: measure(ours[n], theirs[n]) for n in fit}, note, missing)


def pictures(run: RunResult) -> dict[str, Pixels]:
    """A run's pictures by job as they were written; a video's frames by job and number."""
    return {name: read_image(path).pixels for name, path in picture_files(run).items()}


def picture_files(run: RunResult) -> dict[str, Path]:
    """Where a run's pictures lie, and the frames of its videos without loss."""
    files: dict[str, Path] = {}
    for outcome in run.outcomes:
        for output in outcome.outputs:
            if isinstance(output, VideoFile):
                assert output.frames_path, "a bench keeps every frame"
                frames = sorted((run.folder / output.frames_path).glob("*.png"))
                files |= {f"{outcome.custom_id}{_FRAME}{n:04}": p for n, p in enumerate(frames)}
            else:
                files[outcome.custom_id] = run.folder / output.path
    return files


def _job_of(name: str) -> str:
    """The job that a picture is of, or a frame."""
    return name.partition(_FRAME)[0]


def measure_with(weights: Path | None) -> tuple[Measure, str]:
    """Distances with LPIPS where its weights are here; its title, or why there is none.

    Raises HyimgError for `weights` that cannot be used.
    """
    try:
        lpips = Lpips.load(weights=weights)
    except HyimgError as error:
        if weights is not None:
            raise
        return distance, f"LPIPS was not measured: {error.what}. {error.hint}"

    def measured(a: Pixels, b: Pixels) -> Distance:
        return replace(distance(a, b), lpips=lpips.distance(a, b))

    return measured, lpips.title
