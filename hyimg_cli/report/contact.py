"""The contact sheet of a run: `report.html` in its folder, a card for each job.

Made from the folder alone (results.jsonl, manifest.resolved.jsonl, run.json, pictures), so a
resumed run replaces it by one of the whole.
"""

import json
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
from hyimg_cli.files import (
    JOURNAL_BYTES,
    SETTINGS_BYTES,
    opened,
    replace_file,
    storage_error,
    text_of,
)
from hyimg_cli.journal.journal import RESOLVED, RESULTS, RUN, RunFolder
from hyimg_cli.media.frames import VIDEO_SUFFIXES, read_frames
from hyimg_cli.media.images import read_image
from hyimg_cli.report.blocks import Card, Cards, Fact, Facts, Page, Section, Text, Tone, Verdict
from hyimg_cli.report.page import render
from hyimg_cli.report.pictures import THUMBNAIL_SIDE, Picture, embedded, missing
from hyimg_cli.spec import digest

NAME = "report.html"
# Cards in one page: with thumbnails of 256 pixels some 10 MB.
MOST_CARDS = 500
_READERS = 4
# The stamp stands in the head of the page, before the styles.
_STAMP_WITHIN = 2000
_NO_TIME = ("queue", "total")


@dataclass(frozen=True)
class _Job:
    """A job as it was resolved and what became of it; either may be empty."""

    custom_id: str
    asked: Mapping[str, Any]
    result: Mapping[str, Any]

    @property
    def status(self) -> str:
        return str(self.result.get("status", "left"))


def write_contact_sheet(folder: Path, *, most: int = MOST_CARDS) -> Path:
    """Replaces `report.html` in a run's folder and gives its path.

    Raises StorageError where it cannot be written, OutputFolderError for a damaged journal.
    """
    path = folder / NAME
    text = contact_sheet(folder, most=most)
    try:
        replace_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise storage_error(error, folder) from error
    return path


def is_current(folder: Path) -> bool:
    """Whether the page is there and was made of the results that are."""
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
    jobs = _jobs(folder)
    info = _object(folder / RUN)
    finished = [job for job in jobs if job.status != "left"]
    shown = sorted(finished, key=lambda job: job.status != "failed")[:most]
    cards = _cards(shown, folder)
    page = Page(
        title=f"hyimg generate: {info.get('manifest', {}).get('name', 'a run')}",
        question="What came of each job?",
        verdict=_verdict(jobs),
        sections=(
            *_sections(cards, len(finished)),
            Section("Environment", (Facts(tuple(_environment(info))),)),
        ),
        stamp=_stamp(folder),
        footer=f"Everything about each job, phases and tokens too, is in {RESULTS}. "
        "Pictures link to the whole files beside this page; times are seconds of the job's own "
        "work, its wait behind other jobs left out.",
    )
    return render(page)


def _jobs(folder: Path) -> list[_Job]:
    """Jobs in the order of the manifest, then results of jobs that are no longer in it."""
    results = RunFolder(folder).results()
    asked = {line["custom_id"]: line for line in _objects(folder / RESOLVED)}
    names = dict.fromkeys((*asked, *results))
    return [_Job(name, asked.get(name, {}), results.get(name, {})) for name in names]


def _verdict(jobs: Sequence[_Job]) -> Verdict:
    counts = Counter(job.status for job in jobs)
    failed, left = counts["failed"], counts["left"]
    parts = [f"{counts['done']} done", f"{failed} failed", *([f"{left} left"] if left else [])]
    tone: Tone = "bad" if failed else "neutral" if left else "good"
    reasons = [f"{left} without a result: run the same command again"] if left else []
    codes = Counter(_error(job).get("code", "") for job in jobs if job.status == "failed")
    reasons += [f"{count} failed with {code}" for code, count in codes.most_common()]
    return Verdict(", ".join(parts), tone, tuple(reasons))


def _sections(cards: Sequence[Card], finished: int) -> Iterator[Section]:
    """Failures apart from pictures; where not every job has a card, a line that says so."""
    failed = tuple(card for card in cards if card.tone == "bad")
    done = tuple(card for card in cards if card.tone != "bad")
    if len(cards) < finished:
        what = f"{len(cards)} of {finished} finished jobs are shown, failed ones first."
        yield Section("Not everything is here", (Text(f"{what} {RESULTS} has the others."),))
    if failed:
        yield Section("Failed", (Cards(failed),))
    if done:
        yield Section("Pictures", (Cards(done),))


def _cards(jobs: Sequence[_Job], folder: Path) -> list[Card]:
    """A card for each job; pictures are read by several threads, a shared source once."""
    source = cache(_thumbnail)
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda job: _card(job, folder, source), jobs))


def _card(job: _Job, folder: Path, source: Callable[[Path], Picture]) -> Card:
    """One job: sources and results in a row, what was asked, what was written, and when."""
    sources = [
        replace(source(folder / image), caption=f"source: {Path(image).name}")
        for image in job.asked.get("images", ())
    ]
    results = [_result(folder, output) for output in job.result.get("outputs") or ()]
    error = _error(job)
    problems = [f"{error.get('code')}: {error.get('message')}"] if error else []
    problems += [f"What to do: {error['hint']}"] if error.get("hint") else []
    return Card(
        title=job.custom_id,
        pictures=(*sources, *results),
        text=job.asked.get("prompt", ""),
        facts=tuple(_facts(job)),
        texts=tuple(_texts(job)),
        details=tuple(_details(job)),
        problems=(*problems, *(f"warning: {w}" for w in job.result.get("warnings") or ())),
        tone="bad" if job.status == "failed" else "neutral",
    )


def _result(folder: Path, output: Mapping[str, Any]) -> Picture:
    """A picture that was made, linked to its file; of a video its first frame."""
    path, link = folder / output["path"], quote(output["path"])
    is_video = path.suffix.lower() in VIDEO_SUFFIXES
    size = f"{output.get('width', '?')}x{output.get('height', '?')}"
    caption = f"{'video' if is_video else 'result'}: {size}, seed {output.get('seed', '?')}"
    return replace(_thumbnail(path), caption=caption, link=link, note="")


def _thumbnail(path: Path) -> Picture:
    """A small picture of a file, or the reason why there is none."""
    is_video = path.suffix.lower() in VIDEO_SUFFIXES
    try:
        pixels = next(read_frames(path)) if is_video else read_image(path).pixels
    except (HyimgError, StopIteration) as error:
        return missing(f"{path.name} cannot be shown: {getattr(error, 'what', 'no frames')}")
    return embedded(pixels, path.name, max_side=THUMBNAIL_SIDE, coding="jpeg")


def _facts(job: _Job) -> Iterator[Fact]:
    """Short facts: settings, time, and how much was reused."""
    asked, result = job.asked, job.result
    if "seed" in asked:
        yield "seed", str(asked["seed"])
    steps = result.get("denoise_steps") or asked.get("num_inference_steps")
    if steps:
        yield "steps", str(steps)
    times = result.get("timings_s") or {}
    if times:
        yield "time", f"{times.get('total', 0.0) - times.get('queue', 0.0):.2f} s"
    if result.get("kv_reuse"):
        yield "KV reuse", str(result["kv_reuse"].get("status"))
    if result.get("attempt", 1) > 1:
        yield "attempt", str(result["attempt"])


def _texts(job: _Job) -> Iterator[Fact]:
    """What the prompt was rewritten to."""
    written = _written(job)
    for name in written.keys() - {"think"}:
        yield name, written[name]
    if job.result.get("think_truncated"):
        yield "note", "the text was cut off before its closing tag"


def _details(job: _Job) -> Iterator[Fact]:
    """What is read now and then: the thinking before the recaption, and the time of each phase."""
    if thoughts := _written(job).get("think"):
        yield "think", thoughts
    times = job.result.get("timings_s") or {}
    phases = [f"{name} {s:.3f} s" for name, s in times.items() if name not in _NO_TIME and s]
    if phases:
        yield "phases", ", ".join([*phases, f"waited before {times.get('queue', 0.0):.3f} s"])


def _written(job: _Job) -> dict[str, str]:
    """The text before the picture by the tags in it; text without them as a whole."""
    text = str(job.result.get("cot_text") or "")
    parts = {
        name: "\n".join(found).strip()
        for name in ("recaption", "think")
        if (found := re.findall(rf"<{name}>(.*?)(?:</{name}>|$)", text, re.DOTALL))
    }
    return parts or ({"text before the picture": text} if text else {})


def _environment(info: Mapping[str, Any]) -> Iterator[Fact]:
    """Versions, hardware, models and the settings that were not left to their defaults."""
    manifest, hardware = info.get("manifest", {}), info.get("hardware", {})
    if manifest:
        yield "manifest", f"{manifest.get('name')}, sha256 {str(manifest.get('digest'))[:16]}…"
    for name, fingerprint in info.get("models", {}).items():
        yield "model", f"{Path(name).name}, fingerprint {str(fingerprint)[:16]}…"
    flags = info.get("flags", {})
    for name, flag in flags.items():
        if flag.get("origin") not in ("default", "model"):
            yield f"{name} ({flag['origin']})", str(flag.get("value"))
    if hardware:
        gpus = ", ".join(map(str, hardware.get("gpus") or ())) or "no GPU"
        yield "machine", f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {gpus}"
        yield "system", str(hardware.get("system"))
    versions = info.get("versions", {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or "?"


def _error(job: _Job) -> Mapping[str, Any]:
    return job.result.get("error") or {}


def _object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none."""
    try:
        value = json.loads(text_of(path, SETTINGS_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file that was written by a run; none where it is not there."""
    try:
        lines = text_of(path, JOURNAL_BYTES).split("\n")
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.strip()]
