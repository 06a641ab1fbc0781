"""Messages together with the files they name, for replicas without a shared disk."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyimg_cli.engine.replicas.messages import EventBatch, PieceDone
from hyimg_cli.engine.replicas.replica import ReplicaFolder
from hyimg_cli.errors import StorageError
from hyimg_cli.files import LATENTS_BYTES, bytes_of, remove, replace_file
from hyimg_cli.journal.disk import disk_errors, make_folders
from hyimg_cli.journal.journal import OUTPUTS, JobFolder, files_of, files_of_result, outcome_to_json
from hyimg_cli.manifest.file_names import path_of
from hyimg_cli.spec.events import JobEnded
from hyimg_cli.spec.plan import Plan

logger = logging.getLogger(__name__)
_MOST_FILE_BYTES = 100_000_000_000


@dataclass(frozen=True)
class Parcel:
    """A replica's message with its jobs' files by name, and latents by custom_id."""

    message: EventBatch | PieceDone
    files: Mapping[str, bytes]
    latents: Mapping[str, bytes]

    def unpack(self, folder: Path) -> EventBatch | PieceDone:
        """Store the files where a local replica would have; return the message."""
        replica = ReplicaFolder(folder)
        with disk_errors(folder):
            for name, data in self.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                replace_file(folder / name, data, syncs_folder=False)
        try:
            put_latents(replica, self.latents)
        except StorageError as error:
            logger.warning("%s: the latents were not saved: %s", list(self.latents), error.what)
        return self.message


def supplies_for(piece: Plan, folder: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return what the run's folder has for a piece's jobs.

    These are the latents by custom_id, and any folders at the paths of the jobs' files.
    """
    replica, latents = ReplicaFolder(folder), {}
    for job in piece.jobs:
        with disk_errors(folder), suppress(FileNotFoundError):
            path = replica.latents_for(job.custom_id)
            latents[job.custom_id] = bytes_of(path, LATENTS_BYTES)
    outputs = ({"path": f"{OUTPUTS}/{path_of(job)}"} for job in piece.jobs)
    files = (file for output in outputs for file in files_of(output))
    return latents, tuple(file for file in files if replica.is_folder(file))


def put_latents(folder: JobFolder, latents: Mapping[str, bytes]) -> None:
    """Store latents that were sent, so that their jobs can resume. Raises StorageError."""
    for custom_id, data in latents.items():
        path = folder.latents_for(custom_id)
        with disk_errors(path):
            make_folders(path.parent)
            replace_file(path, data)


class Packer:
    """A replica's folder on a separate machine, filled and emptied for each piece."""

    def __init__(self, folder: Path) -> None:
        self._folder = ReplicaFolder(folder)
        self._latents: dict[str, tuple[int, int]] = {}

    def begin(self, piece: Plan, latents: Mapping[str, bytes], folders: Iterable[str]) -> None:
        """Store what the run's folder has for the piece's jobs."""
        for name in folders:
            (self._folder.run / name).mkdir(parents=True, exist_ok=True)
        put_latents(self._folder, latents)
        self._latents = {job.custom_id: (0, 0) for job in piece.jobs}
        self.take_latents()  # the sender has these already

    def parcels(self, messages: Iterable[EventBatch | PieceDone]) -> Iterator[Parcel]:
        """Yield each message with its files, which are removed here."""
        for message in messages:
            files: dict[str, bytes] = {}
            for event in message.events if isinstance(message, EventBatch) else ():
                if isinstance(event, JobEnded):
                    for name in files_of_result(outcome_to_json(event.outcome)):
                        path = self._folder.folder / name
                        # For a folder of frames, every file.
                        for one in filter(Path.is_file, (path, *sorted(path.glob("*")))):
                            key = one.relative_to(self._folder.folder).as_posix()
                            files[key] = bytes_of(one, _MOST_FILE_BYTES)
                        remove(path)
            yield Parcel(message, files, self.take_latents())

    def take_latents(self) -> dict[str, bytes]:
        """Return the latents that have changed since the last call."""
        found = {}
        for custom_id, former in self._latents.items():
            path = self._folder.latents_for(custom_id)
            with suppress(FileNotFoundError):
                status = path.stat()
                # With a coarse clock, several versions may have the same time.
                version = status.st_mtime_ns, status.st_ino
                if version != former:
                    self._latents[custom_id] = version
                    found[custom_id] = bytes_of(path, LATENTS_BYTES)
        return found
