"""Find settings that the manifest's jobs do not read, because of their kind or format."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from hyimg_cli.manifest.fields import AR_FIELDS
from hyimg_cli.settings.config import Setting, as_given
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest, VideoJob
from hyimg_cli.spec.options import KeepOutside
from hyimg_cli.spec.units import counted, names_text


def without_effect(
    settings: Mapping[str, Setting], jobs: Sequence[Job], card_of: Callable[[str], ModelCard]
) -> Iterator[str]:
    """Yield a sentence for each kind of job whose settings were given but which `jobs` lacks.

    Also yields sizes that the jobs ask for and their models do not make.
    """
    pictures = [job for job in jobs if isinstance(job, ImageJob)]
    films = [job for job in jobs if isinstance(job, VideoJob)]
    if jobs and not (pictures and films):
        noun = "videos" if pictures else "pictures"
        names = [row.name for row in SETTINGS.values() if row.only == noun]
        yield from _concern(settings, names, f"{noun} only; this manifest has none")
    denoising = [card_of(model).denoises_latents for model in {job.model for job in pictures}]
    if pictures and not films and not any(denoising):
        names = [row.name for row in SETTINGS.values() if row.only == "latents"]
        what = "videos and diffusers image models only; this manifest has none"
        yield from _concern(settings, names, what)
    if pictures and not films and all(denoising):
        what = "models that write text only; this manifest has none"
        own = ["drop_think", *AR_FIELDS, "batching_max_size", "batch_invariant"]
        yield from _concern(settings, own, what)
    yield from _fitted(pictures, card_of)
    if films and not any(job.camera for job in films) and settings["clips_together"].value > 1:
        of_models = "models that follow a camera only; no video uses one"
        yield from _concern(settings, ["clips_together"], of_models)
    if pictures and all(job.encoding.quality is None for job in pictures):
        formats = "JPEG and lossy WebP only; no result has these formats"
        yield from _concern(settings, ["quality"], formats)
    if pictures and all(job.encoding.format != "webp" for job in pictures):
        yield from _concern(settings, ["lossless"], "WebP only; no result has this format")
    kept = [job.outside for job in pictures if job.outside is not None]
    if pictures and not any(outside.region for outside in kept):
        names = ["region_mode", "max_spill"] if kept else [f.name for f in fields(KeepOutside)]
        kind = "a region" if kept else "keep_outside"
        yield from _concern(settings, names, f"edits with {kind} only; no job is one")
    if jobs and not films and not any(job.negative_prompt for job in pictures):
        yield from _concern(settings, ["negative_prompt"], "models that take one; no job uses one")
    named = sum("name" in job.user_fields for job in jobs)
    if named and _is_given(settings["name"]):
        flag, jobs_named = as_given(settings["name"]), f"{named} of {len(jobs)} jobs"
        yield f"{flag} has no effect for {jobs_named}: their lines set a name"


def _fitted(jobs: Iterable[ImageJob], card_of: Callable[[str], ModelCard]) -> Iterator[str]:
    """Yield a sentence for each model on jobs that get another size than they ask for."""
    counts = Counter((job.model, size) for job in jobs if (size := job.asked_size) is not None)
    changes: dict[str, dict[str, int]] = {}
    for (model, asked), count in counts.items():
        bucket = card_of(model).bucket_of(SizeRequest(asked.height, asked.width))
        if bucket is not None and bucket.size != asked:
            own = changes.setdefault(card_of(model).name, {})
            own[f"{asked} is fitted to {bucket.size}"] = count
    for name, found in changes.items():
        of = counted(sum(found.values()), "job")
        yield f"{name} does not make the size of {of}: {names_text([*found], 3)}"


def _concern(settings: Mapping[str, Setting], names: Iterable[str], what: str) -> Iterator[str]:
    """Yield a sentence on the settings in question that were given."""
    found = [as_given(settings[name]) for name in names if _is_given(settings[name])]
    if found:
        yield f"{', '.join(found)} {'applies' if len(found) == 1 else 'apply'} to {what}"


def _is_given(setting: Setting) -> bool:
    return setting.origin not in ("default", "model", "record")
