"""Where a replica puts its files until they travel: a folder of its own on the machine it runs on.

Whoever is killed leaves its folder behind; the next replica there removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hyimg_cli.files import LATENTS_BYTES, bytes_of, descriptor_of, replace_file
from hyimg_cli.journal.job_files import OUTPUTS, files_of_result
from hyimg_cli.journal.journal import JobFolder, Made, outcome_to_json
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.plan import Plan

_LOCK = ".lock"
_MOST_FILE_BYTES = 100_000_000_000


def place() -> Path:
    """Folder of all replicas' folders on this machine; it holds nobody's but this user's."""
    found = Path(tempfile.gettempdir()) / f"hyimg-replicas-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if found.is_symlink() or found.stat().st_uid != os.getuid():
        found = Path(tempfile.mkdtemp(prefix="hyimg-replicas-"))
    return found


def own_folder() -> Path:
    """A new folder, this process's until it ends; those of processes that have ended go."""
    above = place()
    with _locked(above / _LOCK):
        _clear(above)
        folder = Path(tempfile.mkdtemp(dir=above))
        _ = _held(folder / _LOCK)  # until the process ends
    return folder


def clear() -> None:
    """Remove what ended replicas left on this machine."""
    with contextlib.suppress(OSError), _locked(place() / _LOCK):
        _clear(place())


def _clear(above: Path) -> None:
    for folder in above.iterdir():
        if folder.is_dir() and (lock := _held(folder / _LOCK, wait=False)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _held(path)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _held(path: Path, *, wait: bool = True) -> int | None:
    lock = descriptor_of(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


class ScratchFolder(JobFolder):
    """The folder that a replica's session sees: what is put there is taken out to travel."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / OUTPUTS).mkdir()
        self._attempts: Mapping[str, int] = {}
        self._made: list[Made] = []
        self._latents: dict[str, tuple[int, int]] = {}

    def begin(self, piece: Plan, attempts: Mapping[str, int], latents: Mapping[str, bytes]) -> None:
        """Make ready for a piece's jobs."""
        self._attempts = attempts
        self._latents = dict.fromkeys((job.custom_id for job in piece.jobs), (0, 0))
        for custom_id, data in latents.items():
            path = self.latents_for(custom_id)
            path.parent.mkdir(exist_ok=True)
            replace_file(path, data, is_lasting=False)
            self._latents[custom_id] = _version(path)

    def attempts(self) -> dict[str, int]:
        return dict(self._attempts)

    def append(self, outcome: Outcome) -> None:
        paths = files_of_result(outcome_to_json(outcome))
        # Who sees a film sees what stands beside it.
        files = {name: data for path in reversed(paths) for name, data in self._taken(path)}
        self._made.append(Made(outcome, files))

    def store(self, made: Sequence[Made]) -> None:
        raise NotImplementedError("a replica makes what it tells")

    def take(self) -> tuple[Made, ...]:
        """What was appended since the last time."""
        made, self._made = self._made, []
        return tuple(made)

    def take_latents(self, custom_id: str | None) -> dict[str, bytes]:
        """A job's latents, where they are others than the last time."""
        if custom_id not in self._latents:
            return {}
        path = self.latents_for(custom_id)
        with contextlib.suppress(FileNotFoundError):
            if (version := _version(path)) != self._latents[custom_id]:
                self._latents[custom_id] = version
                return {custom_id: bytes_of(path, LATENTS_BYTES)}
        return {}

    def _taken(self, name: str) -> Iterator[tuple[str, bytes]]:
        """A file, or the files of a folder of frames, by their names; here they go."""
        path = self.folder / name
        if path.is_dir():
            for frame in sorted(path.iterdir()):
                yield from self._taken(f"{name}/{frame.name}")
            path.rmdir()
        elif path.exists():  # a film that says nothing has no sidecar
            yield name, bytes_of(path, _MOST_FILE_BYTES)
            path.unlink()


def _version(path: Path) -> tuple[int, int]:
    """Another one for each replacement: several may have one time, by a clock that ticks slowly."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino
