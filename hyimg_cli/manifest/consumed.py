"""Settings that one kind of job or format alone reads, and a manifest has none of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from hyimg_cli.settings.option import JobKind
from hyimg_cli.settings.precedence import Setting, as_given
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.options import KeepOutside

_KINDS: tuple[tuple[JobKind, type[Job]], ...] = (("pictures", ImageJob), ("videos", VideoJob))


def without_effect(settings: Mapping[str, Setting], jobs: Sequence[Job]) -> Iterator[str]:
    """A sentence for each kind of job that settings were given for and `jobs` has none of."""
    for noun, kind in _KINDS:
        if not jobs or any(isinstance(job, kind) for job in jobs):
            continue
        asked = (settings[row.name] for row in SETTINGS.values() if row.only == noun)
        found = [as_given(one) for one in asked if _is_given(one)]
        if found:
            verb = "concerns" if len(found) == 1 else "concern"
            yield f"{', '.join(found)} {verb} {noun} only; this manifest has none"
    yield from _idle_chunks(settings, [job for job in jobs if isinstance(job, VideoJob)])
    pictures = [job for job in jobs if isinstance(job, ImageJob)]
    yield from _idle_encoding(settings, pictures)
    yield from _idle_outside(settings, pictures)
    named = sum("name" in job.user_fields for job in jobs)
    if named and _is_given(settings["name"]):
        flag, jobs_named = as_given(settings["name"]), f"{named} of {len(jobs)} jobs"
        yield f"{flag} is not used for {jobs_named}: their lines have a name"


def _is_given(setting: Setting) -> bool:
    return setting.origin not in ("default", "model")


def _idle_chunks(settings: Mapping[str, Setting], jobs: Sequence[VideoJob]) -> Iterator[str]:
    """The same of what only models that work in chunks read: those that follow a camera."""
    if jobs and not any(job.camera for job in jobs):
        one = settings["clips_together"]
        if _is_given(one) and one.value > 1:
            yield f"{as_given(one)} concerns models that follow a camera only; no video is of one"


def _idle_encoding(settings: Mapping[str, Setting], jobs: Sequence[ImageJob]) -> Iterator[str]:
    """The same of what only some formats of pictures read."""
    read = {
        "quality": ("JPEG and lossy WebP", any(job.encoding.quality is not None for job in jobs)),
        "lossless": ("WebP", any(job.encoding.format == "webp" for job in jobs)),
    }
    for name, (formats, is_read) in read.items():
        one = settings[name]
        if jobs and not is_read and _is_given(one):
            yield f"{as_given(one)} concerns {formats} only; no picture is one"


def _idle_outside(settings: Mapping[str, Setting], jobs: Sequence[ImageJob]) -> Iterator[str]:
    """The same of what only edits read that keep their source, or that have a region."""
    kept = [job.outside for job in jobs if job.outside is not None]
    if any(outside.region for outside in kept):
        return
    names = ("region_mode", "max_spill") if kept else [field.name for field in fields(KeepOutside)]
    found = [as_given(settings[name]) for name in names if _is_given(settings[name])]
    if jobs and found:
        verb = "concerns" if len(found) == 1 else "concern"
        kind = "a region" if kept else "keep_outside"
        yield f"{', '.join(found)} {verb} edits with {kind} only; no job is one"
