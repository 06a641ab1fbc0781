"""Settings that one kind of job or format alone reads, and a manifest has none of."""

from collections.abc import Iterator, Mapping, Sequence

from hyimg_cli.settings.precedence import Setting, as_given
from hyimg_cli.settings.table import SETTINGS, JobKind
from hyimg_cli.spec.job import ImageJob, Job, VideoJob

_KINDS: tuple[tuple[JobKind, type[Job]], ...] = (("pictures", ImageJob), ("videos", VideoJob))


def without_effect(settings: Mapping[str, Setting], jobs: Sequence[Job]) -> Iterator[str]:
    """A sentence for each kind of job that settings were given for and `jobs` has none of."""
    for noun, kind in _KINDS:
        if not jobs or any(isinstance(job, kind) for job in jobs):
            continue
        asked = (settings[row.name] for row in SETTINGS.values() if row.only == noun)
        found = [as_given(one) for one in asked if one.origin not in ("default", "model")]
        if found:
            verb = "concerns" if len(found) == 1 else "concern"
            yield f"{', '.join(found)} {verb} {noun} only; this manifest has none"
    yield from _idle_chunks(settings, [job for job in jobs if isinstance(job, VideoJob)])
    yield from _idle_encoding(settings, [job for job in jobs if isinstance(job, ImageJob)])


def _idle_chunks(settings: Mapping[str, Setting], jobs: Sequence[VideoJob]) -> Iterator[str]:
    """The same of what only models that work in chunks read: those that follow a camera."""
    if jobs and not any(job.camera for job in jobs):
        for one in (settings["pass_graphs"], settings["clips_together"]):
            if one.origin not in ("default", "model"):
                yield f"{as_given(one)} concerns LingBot-World only; no video is its"


def _idle_encoding(settings: Mapping[str, Setting], jobs: Sequence[ImageJob]) -> Iterator[str]:
    """The same of what only some formats of pictures read."""
    read = {
        "quality": ("JPEG and lossy WebP", any(job.encoding.quality is not None for job in jobs)),
        "lossless": ("WebP", any(job.encoding.format == "webp" for job in jobs)),
    }
    for name, (formats, is_read) in read.items():
        one = settings[name]
        if jobs and not is_read and one.origin not in ("default", "model"):
            yield f"{as_given(one)} concerns {formats} only; no picture is one"
