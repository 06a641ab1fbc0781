"""Folders of runs joined into one: lines and files as they are, contradictions refused.

Two clusters that shared a manifest have a folder each; so had shards, in earlier versions.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import opened, refuse_unfit
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.job_files import files_of, files_of_edit
from hyimg_cli.journal.journal import MISSING, RunFolder
from hyimg_cli.journal.past_run import read_run_info, resolved_jobs
from hyimg_cli.manifest.file_names import EDIT_SUFFIXES
from hyimg_cli.manifest.resolved import lines_moved
from hyimg_cli.settings.file_names import clashes
from hyimg_cli.spec import digest


@dataclass
class Merged:
    """Jobs of a joined folder: `missing` are those that no folder has done, `failed`
    among them; `damaged`: done ones whose files are gone or changed, which are missing too.
    """

    done: int = 0
    failed: int = 0
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Found:
    """An outcome with the line and the folder that it is from."""

    outcome: Mapping[str, Any]
    line: bytes
    folder: Path

    @property
    def is_done(self) -> bool:
        return bool(self.outcome.get("status") == "done")

    @property
    def outputs(self) -> Sequence[Mapping[str, Any]]:
        return self.outcome.get("outputs") or ()

    def is_intact(self) -> bool:
        """Tell if all of its files are there as they were written."""
        with suppress(OSError, KeyError, TypeError):
            return bool(self.outputs) and all(
                digest.of_file(self.folder / output["path"]) == output["sha256"]
                for output in self.outputs
            )
        return False

    def files(self) -> Iterator[str]:
        """Every file of it, frames one by one."""
        for output in self.outputs:
            for name in files_of(output):
                count = output.get("num_frames", 0) if name == output.get("frames_path") else 0
                yield from [f"{name}/{n:04}.png" for n in range(count)] or [name]
        yield from files_of_edit(self.outcome)

    def is_changed(self, name: str) -> bool:
        """Tell if a file of an edit is another one than its line says. Raises OSError."""
        edit = self.outcome.get("edit") or {}
        kind = next((one for one in EDIT_SUFFIXES if edit.get(one) == name), None)
        with suppress(KeyError, TypeError):
            return kind is not None and edit["sha256"][kind] != digest.of_file(self.folder / name)
        return True


def merge(folders: Sequence[Path], into: Path) -> Merged:
    """Joins folders into one, which may have results already: they stay.

    A done job wins over a failed one. Writes `manifest.resolved.jsonl` of all jobs, and the
    manifest of those that are missing. Raises OutputFolderError where two folders have done a job
    of one id otherwise, or two jobs have one file; then nothing is written.
    """
    with run_folder(into) as target:
        sources = [into, *(folder for folder in folders if not _is_same(folder, into))]
        found = {folder: _outcomes(folder) for folder in sources}
        told: dict[str, dict[Path, dict[str, Any]]] = {}
        for folder in sources:
            for name, line in _resolved(folder, into).items():
                told.setdefault(name, {})[folder] = line
        order = dict.fromkeys([*told, *(name for some in found.values() for name in some)])
        chosen: dict[str, _Found] = {}
        merged = Merged()
        for name in order:
            one = _chosen(name, [some[name] for some in found.values() if name in some], merged)
            if one is not None:
                chosen[name] = one
        _refuse_clashes(chosen)
        # The line of a job is where its outcome is from: another folder may know it otherwise.
        of = {name: one.folder for name, one in chosen.items()}
        jobs = {
            name: lines.get(of.get(name, into)) or next(iter(lines.values()))
            for name, lines in told.items()
        }
        for one in chosen.values():
            _bring(one, target)
        target.write_results(one.line for one in chosen.values())
        target.write_as_is(jobs.values())
        info = next(filter(None, map(read_run_info, sources)), {})
        target.write_run(info | {"merged": [folder.name for folder in folders]})
        done = {name for name, one in chosen.items() if one.is_done}
        merged.done, merged.failed = len(done), len(chosen) - len(done)
        merged.missing = [name for name in order if name not in done]
        target.write_as_is((jobs[name] for name in merged.missing if name in jobs), MISSING)
    return merged


def _is_same(folder: Path, other: Path) -> bool:
    if address_of(folder) or address_of(other):
        return shown_place(folder) == shown_place(other)
    return other.exists() and folder.exists() and folder.samefile(other)


def _outcomes(folder: Path) -> dict[str, _Found]:
    lines = run_folder(folder).last_lines()
    return {name: _Found(entry, line, folder) for name, (entry, line) in lines.items()}


def _resolved(folder: Path, into: Path) -> dict[str, dict[str, Any]]:
    """Lines of a folder's jobs by custom_id, their paths led from `into`."""
    try:
        lines = dict(resolved_jobs(folder))
        return dict(zip(lines, lines_moved(lines.values(), folder, into), strict=True))
    except (OSError, ValueError):
        raise OutputFolderError(
            "its manifest.resolved.jsonl cannot be read",
            where=folder,
            hint="plan or generate with this folder writes it again",
            code="output.damaged-manifest",
        ) from None


def _chosen(name: str, found: Sequence[_Found], merged: Merged) -> _Found | None:
    """The outcome that counts of a job; None where all that is left of it is a damaged file."""
    done = [one for one in found if one.is_done]
    for other in done[1:]:
        if other.outcome.get("key") != done[0].outcome.get("key"):
            raise OutputFolderError(
                f'"{name}" was done otherwise in {shown_place(done[0].folder)}: its line, a source '
                "image, the model or a setting differs",
                where=other.folder,
                hint="leave one of the folders out; run.json has the flags of each",
                code="output.other-job",
            )
    intact = next((one for one in done if one.is_intact()), None)
    if done and intact is None:
        merged.damaged.append(name)
    failed = [one for one in found if not one.is_done]
    return intact or (failed[-1] if failed else None)


def _refuse_clashes(chosen: Mapping[str, _Found]) -> None:
    owners = [(output["path"], name) for name, one in chosen.items() for output in one.outputs]
    for later, earlier in clashes([path for path, _ in owners]):
        path, name = owners[later]
        other = owners[earlier][1]
        raise OutputFolderError(
            f'{path} would be the file of "{name}" and of "{other}"',
            where=chosen[name].folder,
            hint="join folders of one manifest, or of manifests whose ids and names differ",
            code="output.other-file",
        )


def _bring(one: _Found, target: RunFolder) -> None:
    """Puts the files of an outcome where they belong. Its results were looked at; of what stands
    beside them (a film's sidecar and frames, an edit's redraw and matte) what is gone or changed
    stays away.
    """
    if one.folder == target.place:
        return
    for name in one.files():
        with disk_errors(one.folder), suppress(FileNotFoundError):
            if one.is_changed(name):
                continue
            path = one.folder / name
            if not address_of(path):
                refuse_unfit(path, os.stat(path))
                target.bring(name, path)
                continue
            with opened(path) as file, tempfile.NamedTemporaryFile() as local:
                shutil.copyfileobj(file, local)
                local.flush()
                target.bring(name, Path(local.name))
