"""Read a run's folder without its lock: its jobs, each with its line and its result.

Any part may be missing, damaged, or of another run: callers check.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import JOURNAL_BYTES, SETTINGS_BYTES, json_of, opened, text_of
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import RESOLVED, RUN, RunFolder, outputs_of
from hyimg_cli.manifest.fields import PATH_FIELDS
from hyimg_cli.settings.name_template import files_in_order
from hyimg_cli.spec.job import ANSWER_SUFFIX

_FRAME = " frame "


@dataclass(frozen=True)
class PastJob:
    """A job of an earlier run: its resolved `line`, its `result` line, and the run's `folder`.

    `line` is empty if manifest.resolved.jsonl no longer has the job; `result` is empty until the
    job has ended. Paths in both are relative to `folder`.
    """

    line: Mapping[str, Any]
    result: Mapping[str, Any] = field(repr=False)
    folder: Path

    @property
    def custom_id(self) -> str:
        return str((self.line or self.result)["custom_id"])

    @property
    def is_done(self) -> bool:
        """True if it was drawn; False if it failed or has not ended."""
        return bool(self.result.get("status") == "done")

    @property
    def outputs(self) -> tuple[Mapping[str, Any], ...]:
        """The files that it wrote, with their facts; none if it is not done."""
        return tuple(outputs_of(self.result)) if self.is_done else ()


def past_jobs(folder: Path) -> Iterator[PastJob]:
    """Yield the jobs of a run's folder, here or in a store, in the order of its manifest.

    Jobs whose line is gone follow. Needs no lock, so a run may be writing. Raises OutputFolderError
    at the first line that cannot be read.
    """
    results, names = run_folder(folder).results(), set[str]()
    for name, line in resolved_jobs(folder):
        names.add(name)
        yield PastJob(line, results.get(name, {}), folder)
    for name, result in results.items():
        if name not in names:
            yield PastJob({}, result, folder)


def read_run_info(folder: Path) -> dict[str, Any]:
    """Return the object of run.json; empty if it does not exist."""
    try:
        info = json_of(text_of(folder / RUN, SETTINGS_BYTES))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def object_in(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object in run.json, which is untrusted; empty if it is not an object."""
    part = info.get(name)
    return part if isinstance(part, dict) else {}


def resolved_jobs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of manifest.resolved.jsonl with their custom_id; none without that file.

    Raises OutputFolderError at the first line that cannot be read.
    """
    try:
        with suppress(FileNotFoundError), opened(folder / RESOLVED, JOURNAL_BYTES) as file:
            for line in file:
                entry = json_of(line.decode()) if line.strip() else None
                if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str):
                    for name in PATH_FIELDS.keys() & entry.keys():
                        PATH_FIELDS[name].read(entry[name])
                    yield entry["custom_id"], entry
    except (OSError, ValueError) as error:
        raise OutputFolderError(
            f"{RESOLVED} cannot be read: {error}",
            where=folder,
            hint="run plan or generate with this folder to write it again",
            code="output.damaged-manifest",
        ) from error


def readable_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of `resolved_jobs` by custom_id; empty if any line cannot be read."""
    try:
        return dict(resolved_jobs(folder))
    except OutputFolderError:
        return {}


def output_files(folder: Path, *, by_frame: bool = False) -> dict[str, Path]:
    """Return the pictures and videos of finished jobs by custom_id; a second one is `id[1]`.

    `by_frame`: instead of a video, its PNG files if it has some, as `id frame 0000`.
    """
    found: dict[str, Path] = {}
    for name, entry in RunFolder(folder).results().items():
        for number, output in enumerate(PastJob({}, entry, folder).outputs):
            if by_frame and output.get("frames_path"):
                frames = files_in_order(folder / output["frames_path"], "*.png")
                found |= {f"{name}{_FRAME}{n:04}": path for n, path in enumerate(frames)}
            elif not str(output["path"]).endswith(ANSWER_SUFFIX):
                found[f"{name}[{number}]" if number else name] = folder / output["path"]
    return found


def job_of(name: str) -> str:
    """Return the job of a frame in `output_files`; any other name is returned unchanged."""
    return name.partition(_FRAME)[0]
