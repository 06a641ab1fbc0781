"""Check the folders that a run writes to: write permission and free space."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hyimg_cli.addresses import address_of
from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.doctor.check import Check, portable_path
from hyimg_cli.errors import CheckpointError, HyimgError
from hyimg_cli.files import nearest_existing
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.models import registry
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.units import bytes_text
from hyimg_cli.surroundings import temporary_folder

# One night's pictures. A PNG of noise is about as large as its pixels, and others are smaller.
PICTURES, BYTES_PER_PIXEL = 500, 3


def output_folder(config: RunConfig) -> Check:
    """Check free space for a night's pictures; `hyimg plan` counts videos."""
    folder = config.output.folder
    if address := address_of(folder):
        try:
            done = len(run_folder(folder).results())
        except HyimgError as error:
            return Check("failed", f"{address}: {error.what}", error.hint)
        return Check("ok", f"{address} can be read, {done} results")
    free, above = free_bytes(folder), nearest_existing(folder)
    found = f"{portable_path(folder)}: {bytes_text(free)} free"
    if not _is_writable(above):
        return Check("failed", f"{found}, but cannot be written", "choose another with -o")
    needed = 0
    with suppress(CheckpointError):  # another check reports it
        card = registry.model_card(config.model.model, config.model.revision)
        needed = PICTURES * card.base_size**2 * BYTES_PER_PIXEL
        found += f"; {PICTURES} pictures take at most {bytes_text(needed)}"
    if needed >= free:
        return Check("warning", found, "free some space, or choose another folder with -o")
    return Check("ok", found)


def cache_folder(config: RunConfig) -> Check:
    """Check the disk cache's size and its limit against the free space."""
    cache = config.cache
    if cache.folder is None or not cache.budget_bytes:
        return Check("ok", "off: source images are encoded again in each run")
    shown = portable_path(cache.folder)
    if not _is_writable(nearest_existing(cache.folder)):
        hint = "choose another with --cache-dir, or turn it off with --no-disk-cache"
        return Check("failed", f"{shown} cannot be written", hint)
    used = DiskStore(cache.folder, cache.budget_bytes).size_bytes
    free = free_bytes(cache.folder)
    found = f"{shown}: {bytes_text(used)} of {bytes_text(cache.budget_bytes)} used"
    found += f", {bytes_text(free)} free"
    if cache.budget_bytes - used > free:
        hint = f"--disk-cache-mb {max(0, int((used + free) * 0.9 / 1e6))} keeps below what is free"
        return Check("warning", f"{found}: less space than its limit", hint)
    return Check("ok", found)


def temporary_files(config: RunConfig) -> Check:
    """Check that a folder for temporary files can be written."""
    folder = Path(temporary_folder())
    return Check("ok", f"{portable_path(folder)}: {bytes_text(free_bytes(folder))} free")


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def _is_writable(place: Path) -> bool:
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
