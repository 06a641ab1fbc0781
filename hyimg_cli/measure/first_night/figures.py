"""Figures of a finished run that say nothing about its pictures: times, memory, kinds, counts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hyimg_cli.journal.past_run import object_in, past_jobs, read_run_info
from hyimg_cli.measure.first_night.commands import Kill, finished


def run_figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a run's folder; texts of warnings and names are left out.

    Raises OutputFolderError if a line cannot be read.
    """
    jobs = [*past_jobs(folder)]
    done = [job.result for job in jobs if job.is_done]
    failed = Counter(
        str((job.result.get("error") or {}).get("code", "left")) for job in jobs if not job.is_done
    )
    edits = [edit for one in done if (edit := one.get("edit"))]
    doubts = sum(bool(edit.get("doubts")) for edit in edits)
    return {
        "jobs": len(jobs),
        "done": len(done),
        "failed": dict(failed),
        "seconds_a_picture": spread((one.get("share_s") or {}).get("total") for one in done),
        "seconds_by_phase": by_phase(one.get("timings_s") or {} for one in done),
        "peak_memory_mb": max((one.get("peak_memory_mb") or 0 for one in done), default=0),
        "steps": sorted({one.get("denoise_steps") for one in done} - {None, 0}),
        "kinds": dict(Counter(str(edit.get("kind")) for edit in edits)),
        "crops": sum("crop" in edit for edit in edits),
        "with_doubts": doubts,
        "with_warnings": sum(bool(one.get("warnings")) for one in done),
        "outside_differing_pixels": sum(
            edit.get("outside_differing_pixels") or 0 for edit in edits
        ),
        "edited_share": spread(edit.get("area") for edit in edits),
    }


def machine(folder: Path) -> dict[str, Any]:
    """Return versions and hardware as a run recorded them."""
    info = read_run_info(folder)
    return {name: object_in(info, name) for name in ("versions", "hardware")}


def resumed(kill: Kill, folder: Path) -> dict[str, Any]:
    """Return what became of the jobs that a killed run had finished.

    `drawn_again`: those whose file is another one now; `kept`: the others.
    """
    now = finished(folder)
    again = sum(now.get(name) != digests for name, digests in kill.done.items())
    return {"killed_after": len(kill.done), "kept": len(kill.done) - again, "drawn_again": again}


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return minimum, median and maximum; None without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {
        name: round(value, 4)
        for name, value in (("min", known[0]), ("median", median(known)), ("max", known[-1]))
    }


def by_phase(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase, of the jobs that have it."""
    found = defaultdict[str, list[float]](list)
    for one in timings:
        for name, seconds in one.items():
            found[name].append(seconds)
    return {name: round(median(seconds), 4) for name, seconds in found.items()}


def megapixels(sizes: Sequence[tuple[int, int]]) -> dict[str, float] | None:
    """Return the spread of pictures' megapixels."""
    return spread(height * width / 1e6 for height, width in sizes)
