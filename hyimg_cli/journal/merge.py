"""Folders of runs joined into one: results and files as they are, contradictions refused.

Two clusters that shared a manifest have a folder each; so had shards, in earlier versions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import address_of, shown_place
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.disk import disk_errors
from hyimg_cli.journal.job_files import files_of, files_of_edit
from hyimg_cli.journal.journal import MISSING, RESOLVED, RunFolder
from hyimg_cli.journal.past_run import read_run_info, resolved_jobs
from hyimg_cli.manifest.file_names import EDIT_SUFFIXES
from hyimg_cli.manifest.resolved import lines_moved
from hyimg_cli.settings.file_names import clashes
from hyimg_cli.spec import digest

Entry = Mapping[str, Any]


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
class _Source:
    """A folder to join, with its results and its resolved jobs by custom_id."""

    folder: Path
    results: Mapping[str, Entry]
    jobs: Mapping[str, Entry]


def merge(folders: Sequence[Path], into: Path) -> Merged:
    """Joins folders into one, which may have results already: they stay.

    A done job wins over a failed one. Writes `manifest.resolved.jsonl` of all jobs, and the
    manifest of those that are missing. Raises OutputFolderError where two folders have done a job
    of one id otherwise, or two jobs have one file; then nothing is written.
    """
    with run_folder(into) as target:
        others = (folder for folder in folders if not _is_same(folder, into))
        sources = [_read(folder, into) for folder in (into, *others)]
        order = dict.fromkeys(
            chain(*(source.jobs for source in sources), *(source.results for source in sources))
        )
        chosen: dict[str, _Source] = {}
        merged = Merged()
        for name in order:
            if source := _choose(name, [one for one in sources if name in one.results], merged):
                chosen[name] = source
        _refuse_clashes(chosen)
        # The line of a job is where its outcome is from: another folder may know it otherwise.
        jobs: dict[str, Entry] = {}
        for name in order:
            told = (chosen[name], *sources) if name in chosen else sources
            jobs |= next(({name: one.jobs[name]} for one in told if name in one.jobs), {})
        for name, source in chosen.items():
            if source.folder != into:
                _bring_files(source.results[name], source.folder, target)
        results = [source.results[name] for name, source in chosen.items()]
        target.write_results(results)
        target.write_lines(RESOLVED, jobs.values())
        info = next(filter(None, (read_run_info(source.folder) for source in sources)), {})
        target.write_run(info | {"merged": [folder.name for folder in folders]})
        done = {entry["custom_id"] for entry in results if _is_done(entry)}
        merged.done, merged.failed = len(done), len(results) - len(done)
        merged.missing = [name for name in order if name not in done]
        target.write_lines(MISSING, (jobs[name] for name in merged.missing if name in jobs))
    return merged


def _is_same(folder: Path, other: Path) -> bool:
    if address_of(folder) or address_of(other):
        return shown_place(folder) == shown_place(other)
    return other.exists() and folder.exists() and folder.samefile(other)


def _read(folder: Path, into: Path) -> _Source:
    """A folder's results and jobs; the jobs' paths lead from `into`."""
    try:
        jobs = dict(resolved_jobs(folder))
        moved = dict(zip(jobs, lines_moved(jobs.values(), folder, into), strict=True))
    except (OSError, ValueError):
        raise OutputFolderError(
            "its manifest.resolved.jsonl cannot be read",
            where=folder,
            hint="plan or generate with this folder writes it again",
            code="output.damaged-manifest",
        ) from None
    return _Source(folder, run_folder(folder).results(), moved)


def _choose(name: str, sources: Sequence[_Source], merged: Merged) -> _Source | None:
    """The source whose result of a job counts; None where a damaged file is all that is left."""
    done = [one for one in sources if _is_done(one.results[name])]
    for other in done[1:]:
        if other.results[name].get("key") != done[0].results[name].get("key"):
            raise OutputFolderError(
                f'"{name}" was done otherwise in {shown_place(done[0].folder)}: its line, a source '
                "image, the model or a setting differs",
                where=other.folder,
                hint="leave one of the folders out; run.json has the flags of each",
                code="output.other-job",
            )
    intact = next((one for one in done if _is_intact(one.results[name], one.folder)), None)
    if done and intact is None:
        merged.damaged.append(name)
    failed = [one for one in sources if one not in done]
    return intact or (failed[-1] if failed else None)


def _is_done(entry: Entry) -> bool:
    return bool(entry.get("status") == "done")


def _outputs(entry: Entry) -> Sequence[Entry]:
    return entry.get("outputs") or ()


def _is_intact(entry: Entry, folder: Path) -> bool:
    """True if a result has outputs, and all of them are there as they were written."""
    with suppress(OSError, KeyError, TypeError):
        return bool(_outputs(entry)) and all(
            digest.of_file(folder / output["path"]) == output["sha256"]
            for output in _outputs(entry)
        )
    return False


def _refuse_clashes(chosen: Mapping[str, _Source]) -> None:
    owners = [
        (output["path"], name)
        for name, source in chosen.items()
        for output in _outputs(source.results[name])
    ]
    for later, earlier in clashes([path for path, _ in owners]):
        path, name = owners[later]
        raise OutputFolderError(
            f'{path} would be the file of "{name}" and of "{owners[earlier][1]}"',
            where=chosen[name].folder,
            hint="join folders of one manifest, or of manifests whose ids and names differ",
            code="output.other-file",
        )


def _bring_files(entry: Entry, folder: Path, target: RunFolder) -> None:
    """Put the files of a result where they belong. Its outputs were checked; of a film's sidecar
    and frames, an edit's redraw and matte, what is gone or changed stays away.
    """
    for name in _files(entry):
        with disk_errors(folder), suppress(FileNotFoundError):
            if not _is_changed(entry, name, folder):
                target.bring(name, folder / name)


def _is_changed(entry: Entry, name: str, folder: Path) -> bool:
    """True if a file of an edit is another one than its line says. Raises OSError."""
    edit = entry.get("edit") or {}
    kind = next((one for one in EDIT_SUFFIXES if edit.get(one) == name), None)
    with suppress(KeyError, TypeError):
        return kind is not None and edit["sha256"][kind] != digest.of_file(folder / name)
    return True


def _files(entry: Entry) -> Iterator[str]:
    """Every file of a result, frames one by one."""
    for output in _outputs(entry):
        for name in files_of(output):
            count = output.get("num_frames", 0) if name == output.get("frames_path") else 0
            yield from [f"{name}/{n:04}.png" for n in range(count)] or [name]
    yield from files_of_edit(entry)
