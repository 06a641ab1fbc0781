"""Refuse a full disk, or a cache folder that can be none, before anything is loaded."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hyimg_cli.errors import StorageError
from hyimg_cli.files import nearest_existing
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.work import film_bytes, video_work


def refuse_full_disk(
    folder: Path,
    jobs: Sequence[VideoJob],
    config: RunConfig,
    card_of: Callable[[str], VideoCard],
) -> None:
    """Raises StorageError where `folder` surely has no room for the videos of `jobs`, or where the
    disk cache's folder can be none. Pictures are too small to be counted.
    """
    if not jobs:
        return
    # A cache folder that is missing is made later; one that is a file, or below one, never is.
    cache = nearest_existing(config.cache.folder) if config.cache.folder else None
    if cache is not None and not cache.is_dir():
        raise StorageError(
            "the disk cache's folder is a file",
            where=cache,
            hint="choose another folder with --cache-dir, or leave it out with --no-disk-cache",
            code="storage.cache",
        )
    works = [video_work(job, card_of(job.model)) for job in jobs]
    pixels = sum(work.pixels for work in works)
    needed = film_bytes(pixels, with_frames=config.output.frames != "none")
    # Latents of the one that is under way, beside the copy that replaces them.
    needed += 2 * max(work.latents_bytes for work in works)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the videos will take about {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free",
            where=folder,
            hint="free some space, choose another folder with -o, or run a part with --limit",
            code="storage.full",
        )
