"""The file of a job's kept latents, with the job's key and its progress; no torch."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import LATENTS_BYTES, bytes_of
from hyimg_cli.journal.journal import LATENTS, JobFolder
from hyimg_cli.journal.keys import key_of, source_digest
from hyimg_cli.loading.checkpoint import metadata_of
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Begun

_FORMAT = b"hyimg-latents 1"


def seal(payload: bytes) -> bytes:
    """Return the file's bytes: a line with a checksum, then a safetensors file."""
    return b"%s %s\n%s" % (_FORMAT, hashlib.sha256(payload).hexdigest().encode(), payload)


def unseal(data: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the sealed bytes and their metadata.

    Raises ValueError, KeyError or TypeError if they are damaged.
    """
    payload = data.partition(b"\n")[2]
    if data != seal(payload):
        raise ValueError("the checksum does not match")
    return payload, metadata_of(payload)


def find_begun(folder: JobFolder, jobs: Sequence[Job], config: RunConfig) -> dict[str, Begun]:
    """Return, by custom_id, the progress of those of `jobs` that will resume from latents.

    A job of several drawings has the steps of all of them.
    """
    found = dict[str, list[Begun]]()
    for part, begun in find_begun_parts(folder, jobs, config).items():
        found.setdefault(part.custom_id, []).append(begun)
    counts = {job.custom_id: len(job.parts) for job in jobs if job.custom_id in found}
    return {
        name: Begun(sum(one.step for one in own), counts[name] * own[0].steps)
        for name, own in found.items()
    }


def find_begun_parts(folder: JobFolder, jobs: Iterable[Job], config: RunConfig) -> dict[Job, Begun]:
    """Return the progress of each of the jobs' drawings that will resume from latents."""
    digest_of, found = cache(source_digest), dict[Job, Begun]()
    kept = {path.name for path in (folder.folder / LATENTS).glob("*.safetensors")}
    for part in (part for job in (jobs if kept else ()) for part in job.parts):
        path = folder.latents_for(part.custom_id, part.part)
        if path.name not in kept:
            continue
        with suppress(OSError, OutputFolderError, ValueError, KeyError, TypeError):
            _, facts = unseal(bytes_of(path, LATENTS_BYTES))
            if facts["key"] == key_of(part, [*map(digest_of, part.images)], config):
                found[part] = Begun(int(facts["step"]), int(facts["steps"]))
    return found
