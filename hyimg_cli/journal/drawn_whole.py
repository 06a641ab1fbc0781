"""Edits that an earlier run in the folder drew from the whole source, or from one crop.

They are only finished again when a region is added, or when hyimg would draw crops by itself now.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from hyimg_cli.errors import SourceImageError
from hyimg_cli.finishing.crops import around, crop_of
from hyimg_cli.journal.journal import RunFolder, files_of_edit
from hyimg_cli.journal.keys import key_of, source_digest
from hyimg_cli.manifest.chains import links_of
from hyimg_cli.manifest.pictures import crop_sizes
from hyimg_cli.media.carried import region_parts
from hyimg_cli.media.images import size_of
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import ImageJob, Job, SizeRequest


class DrawnWhole:
    """The drawings of a folder; `count`: how many jobs keep one that has no crop, or only one."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder, self._config, self.count = folder, config, 0
        self._digest_of = cache(source_digest)

    @cached_property
    def _results(self) -> Mapping[str, Mapping[str, Any]]:
        return self._folder.results()

    def settle(self, job: Job) -> Job:
        """Return a job, without the crops that `auto` chose if its drawing exists with fewer."""
        if not isinstance(job, ImageJob) or not _is_chosen(job, self._config):
            return job
        entry = self._results.get(job.custom_id)
        if entry is None or "plain" not in files_of_edit(entry):
            return job
        # A source that cannot be read fails its job later.
        with suppress(SourceImageError):
            digests = [*map(self._digest_of, job.images)]
            for former in _former(job, self._config):
                if entry.get("key") == key_of(former, digests, self._config):
                    self.count += 1
                    return former
        return job


def _is_chosen(job: ImageJob, config: RunConfig) -> bool:
    """Return True if neither the line nor a setting asks for the job's crop.

    The size of a source that is made in the same run is not known here.
    """
    if not job.crops or job.user_fields & {"crop", "region_size"} or links_of(job):
        return False
    return config.outside.region_size == "auto"


def _former(job: ImageJob, config: RunConfig) -> Iterator[ImageJob]:
    """Yield the job as it was drawn before there were crops, or more than one."""
    card, source = registry.model_card(job.model, config.model.revision), size_of(job.kept_image)
    size = card.kept_size(source)
    yield replace(job, crops=(), size=SizeRequest(size.height, size.width))
    if len(job.crops) > 1 and job.outside is not None:
        region = around(region_parts(job.outside, source))
        sizes = crop_sizes(card, config.outside.region_pixels)
        crop = crop_of(region, source, sizes, config.outside.region_context)
        if crop is not None:
            drawn = SizeRequest(crop.drawn.height, crop.drawn.width)
            yield replace(job, crops=(crop.box,), size=drawn)
