"""Edits that an earlier run in the folder drew from the whole source.

They are only finished again when a region is added, or when hyimg would draw a crop by itself now.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hyimg_cli.journal.journal import RunFolder, files_of_edit
from hyimg_cli.journal.keys import key_of, source_digest
from hyimg_cli.media.images import size_of
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest


def as_drawn(
    jobs: Sequence[Job], folder: RunFolder, config: RunConfig
) -> tuple[tuple[Job, ...], int]:
    """Return the jobs, without the crops that `auto` chose for drawings that exist without.

    Also returns their number.
    """
    by_itself = {id(job) for job in jobs if isinstance(job, ImageJob) and _is_chosen(job, config)}
    if not by_itself:
        return tuple(jobs), 0
    results, digest_of, count, found = folder.results(), cache(source_digest), 0, list[Job]()
    for job in jobs:
        entry = results.get(job.custom_id) if id(job) in by_itself else None
        if isinstance(job, ImageJob) and entry is not None and "plain" in files_of_edit(entry):
            whole = _whole(job, config)
            if entry.get("key") == key_of(whole, [*map(digest_of, job.images)], config):
                job, count = whole, count + 1
        found.append(job)
    return tuple(found), count


def _is_chosen(job: ImageJob, config: RunConfig) -> bool:
    """Return True if neither the line nor a setting asks for the job's crop."""
    asked = job.user_fields & {"crop", "region_size"}
    return job.crop is not None and not asked and config.outside.region_size == "auto"


def _whole(job: ImageJob, config: RunConfig) -> ImageJob:
    card = registry.model_card(job.model, config.model.revision)
    size = card.kept_size(size_of(job.kept_image))
    return replace(job, crop=None, size=SizeRequest(size.height, size.width))
