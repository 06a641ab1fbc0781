"""The file of a job's kept latents, with the job's key and its progress; no torch."""

import hashlib
from collections.abc import Iterable
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


def find_begun(folder: JobFolder, jobs: Iterable[Job], config: RunConfig) -> dict[str, Begun]:
    """Return, by custom_id, the progress of those of `jobs` that will resume from latents."""
    digest_of, found = cache(source_digest), dict[str, Begun]()
    kept = {path.stem.replace("~", "/") for path in (folder.folder / LATENTS).glob("*.safetensors")}
    for job in (job for job in jobs if job.custom_id in kept):
        with suppress(OSError, OutputFolderError, ValueError, KeyError, TypeError):
            _, facts = unseal(bytes_of(folder.latents_for(job.custom_id), LATENTS_BYTES))
            if facts["key"] == key_of(job, [*map(digest_of, job.images)], config):
                found[job.custom_id] = Begun(int(facts["step"]), int(facts["steps"]))
    return found
