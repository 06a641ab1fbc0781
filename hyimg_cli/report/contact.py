"""The contact sheet of a run: `report.html` in its folder, a card for each job.

Made from the folder alone (results.jsonl, manifest.resolved.jsonl, run.json, pictures), so a
resumed run replaces it by one of the whole.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hyimg_cli.errors import HyimgError
from hyimg_cli.files import opened, replace_file, storage_error
from hyimg_cli.journal.journal import RESOLVED, RESULTS, RUN, RunFolder
from hyimg_cli.journal.past_run import read_run_info, resolved_jobs
from hyimg_cli.media.frames import VIDEO_SUFFIXES, read_frames
from hyimg_cli.media.images import read_image
from hyimg_cli.report.page import render
from hyimg_cli.report.pictures import EmbeddedPicture, embedded
from hyimg_cli.spec import digest

NAME = "report.html"
# Cards in one page: with thumbnails of 256 pixels some 10 MB.
MOST_CARDS = 500
_READERS = 4
# The stamp stands in the head of the page, before the styles.
_STAMP_WITHIN = 2000
_NO_TIME = ("queue", "total")


@dataclass(frozen=True)
class JobAndResult:
    """A job as it was resolved and what became of it; either may be empty."""

    custom_id: str
    asked: Mapping[str, Any]
    result: Mapping[str, Any]

    @property
    def status(self) -> str:
        return str(self.result.get("status", "left"))

    @property
    def error(self) -> Mapping[str, Any]:
        return self.result.get("error") or {}


def write_contact_sheet(folder: Path) -> Path:
    """Replace `report.html` in a run's folder and gives its path.

    Raises StorageError where it cannot be written, OutputFolderError for a damaged journal.
    """
    path = folder / NAME
    text = contact_sheet(folder)
    try:
        replace_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise storage_error(error, folder) from error
    return path


def is_current(folder: Path) -> bool:
    """True where the page is there and was made of the results that are."""
    try:
        with opened(folder / NAME) as page:
            return _stamp(folder).encode() in page.read(_STAMP_WITHIN)
    except OSError:
        return False


def _stamp(folder: Path) -> str:
    """The digest of all that a page is made of but the pictures."""
    files = (folder / name for name in (RESULTS, RESOLVED, RUN))
    return digest.of_json([digest.of_file(path) for path in files if path.is_file()])


def contact_sheet(folder: Path, *, most: int = MOST_CARDS) -> str:
    """The page of a run. Failed jobs come first; of all, `most` have a card, and it says so."""
    results, asked = RunFolder(folder).results(), dict(resolved_jobs(folder))
    # In the order of the manifest, then results of jobs that are no longer in it.
    names = dict.fromkeys((*asked, *results))
    jobs = [JobAndResult(name, asked.get(name, {}), results.get(name, {})) for name in names]
    finished = [job for job in jobs if job.status != "left"]
    shown = sorted(finished, key=lambda job: job.status != "failed")[:most]
    info = read_run_info(folder)
    return render(
        "contact.html",
        title=f"hyimg generate: {info.get('manifest', {}).get('name', 'a run')}",
        question="What came of each job?",
        **_verdict(jobs),
        stamp=_stamp(folder),
        cards=_cards(shown, folder),
        finished=len(finished),
        info=info,
        results_name=RESULTS,
    )


def _verdict(jobs: Sequence[JobAndResult]) -> dict[str, Any]:
    counts = Counter(job.status for job in jobs)
    failed, left = counts["failed"], counts["left"]
    parts = [f"{counts['done']} done", f"{failed} failed", *([f"{left} left"] if left else [])]
    reasons = [f"{left} without a result: run the same command again"] if left else []
    codes = Counter(job.error.get("code", "") for job in jobs if job.status == "failed")
    reasons += [f"{count} failed with {code}" for code, count in codes.most_common()]
    tone = "bad" if failed else "neutral" if left else "good"
    return {"verdict": ", ".join(parts), "tone": tone, "reasons": reasons}


def _cards(jobs: Sequence[JobAndResult], folder: Path) -> list[dict[str, Any]]:
    """A card for each job; pictures are read by several threads, a shared source once."""
    source = cache(_thumbnail)
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda job: _card(job, folder, source), jobs))


def _card(
    job: JobAndResult, folder: Path, source: Callable[[Path], EmbeddedPicture]
) -> dict[str, Any]:
    """One job: sources and results in a row, what was written, facts, and when."""
    sources = [
        replace(source(folder / image), caption=f"source: {Path(image).name}")
        for image in job.asked.get("images", ())
    ]
    results = [_result(folder, output) for output in job.result.get("outputs") or ()]
    return {
        "job": job,
        "pictures": [*sources, *results],
        "texts": _texts(job),
        "facts": list(_facts(job)),
        "phases": list(_phases(job)),
    }


def _result(folder: Path, output: Mapping[str, Any]) -> EmbeddedPicture:
    """A picture that was made, linked to its file; of a video its first frame."""
    path, link = folder / output["path"], quote(output["path"])
    kind = "video" if path.suffix.lower() in VIDEO_SUFFIXES else "result"
    size = f"{output.get('width', '?')}x{output.get('height', '?')}"
    caption = f"{kind}: {size}, seed {output.get('seed', '?')}"
    return replace(_thumbnail(path), caption=caption, link=link, note="")


def _thumbnail(path: Path) -> EmbeddedPicture:
    """A small picture of a file, or the reason why there is none."""
    is_video = path.suffix.lower() in VIDEO_SUFFIXES
    try:
        pixels = next(read_frames(path)) if is_video else read_image(path).pixels
    except (HyimgError, StopIteration) as error:
        why = getattr(error, "what", "no frames")
        return EmbeddedPicture("", f"{path.name} cannot be shown: {why}")
    return embedded(pixels, path.name, is_thumbnail=True)


def _facts(job: JobAndResult) -> Iterator[tuple[str, str]]:
    """Short facts: settings, time, and how much was reused."""
    asked, result = job.asked, job.result
    if "seed" in asked:
        yield "seed", str(asked["seed"])
    if steps := result.get("denoise_steps") or asked.get("num_inference_steps"):
        yield "steps", str(steps)
    if times := result.get("timings_s"):
        yield "time", f"{times.get('total', 0.0) - times.get('queue', 0.0):.2f} s"
    if result.get("kv_reuse") and asked.get("task") != "t2v":
        yield "KV reuse", str(result["kv_reuse"].get("status"))
    if result.get("attempt", 1) > 1:
        yield "attempt", str(result["attempt"])


def _phases(job: JobAndResult) -> Iterator[str]:
    """The time of each phase, and how long the job waited before the first."""
    times = job.result.get("timings_s") or {}
    phases = {name: s for name, s in times.items() if name not in _NO_TIME and s}
    if phases:
        yield from (f"{name} {seconds:.3f} s" for name, seconds in phases.items())
        yield f"waited before {times.get('queue', 0.0):.3f} s"


def _texts(job: JobAndResult) -> dict[str, str]:
    """The text before the picture by the tags in it; text without them as a whole."""
    text = str(job.result.get("cot_text") or "")
    parts = {
        name: "\n".join(found).strip()
        for name in ("recaption", "think")
        if (found := re.findall(rf"<{name}>(.*?)(?:</{name}>|$)", text, re.DOTALL))
    }
    return parts or ({"text before the picture": text} if text else {})
