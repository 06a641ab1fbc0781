"""The files of jobs in an output folder: what they are called, and whose a name was before."""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.manifest.file_names import EDIT_SUFFIXES, name_of, path_of
from hyimg_cli.settings.file_names import clashes
from hyimg_cli.spec.job import Job

OUTPUTS = "outputs"
_Results = Mapping[str, Mapping[str, Any]]


def files_of(output: Mapping[str, Any]) -> list[str]:
    """Every file of an output: of a video its sidecar and its frames, too."""
    path = str(output["path"])
    sidecar = [path.removesuffix(".mp4") + ".json"] if path.endswith(".mp4") else []
    frames = output.get("frames_path")
    return [path, *sidecar, *([str(frames)] if _is_below(frames) else [])]


def files_of_edit(entry: Mapping[str, Any]) -> list[str]:
    """The files beside the result of a job that keeps its source outside an edit."""
    edit = entry.get("edit")
    found = [edit.get(name) for name in EDIT_SUFFIXES] if isinstance(edit, Mapping) else []
    return [str(path) for path in found if _is_below(path)]


def files_of_result(entry: Mapping[str, Any]) -> list[str]:
    """Every file of a job, by its line: of a failed one the redraw that is kept."""
    return [*(file for one in outputs_of(entry) for file in files_of(one)), *files_of_edit(entry)]


def is_renamed(job: Job, entry: Mapping[str, Any]) -> bool:
    """True where a done job's file is called otherwise by now, but for its format."""
    paths = (PurePosixPath(output["path"]) for output in outputs_of(entry))
    name = f"{OUTPUTS}/{name_of(job)}"
    return any(str(path).removesuffix(path.suffix) != name for path in paths)


def refuse_files_of_others(jobs: Sequence[Job], results: _Results, own: Collection[str]) -> None:
    """Raises OutputFolderError where a job's file would be that of a result of another manifest:
    of one whose id is not among `own`.
    """
    others = {
        output["path"]: name
        for name, entry in results.items()
        if name not in own
        for output in outputs_of(entry)
    }
    if not others:
        return
    paths = [*others, *(f"{OUTPUTS}/{path_of(job)}" for job in jobs)]
    for later, earlier in clashes(paths):
        if earlier < len(others) <= later:
            path, job = paths[earlier], jobs[later - len(others)]
            raise OutputFolderError(
                f'{path} would be the file of "{job.custom_id}"; it is that of "{others[path]}"',
                where=job.source_line,
                hint="choose another folder with -o, or another --name",
                code="output.other-file",
            )


def refuse_sources(folder: Path, jobs: Sequence[Job], to_run: Sequence[Job]) -> None:
    """Raises OutputFolderError where a file of `to_run` would take a source picture's place."""
    outputs, real = os.path.realpath(folder / OUTPUTS), cache(os.path.realpath)
    paths = dict.fromkeys(image for job in jobs for image in job.images)
    sources = [f"{real(os.path.dirname(path))}/{os.path.basename(path)}" for path in paths]
    sources = [path for path in sources if path.startswith(f"{outputs}/") and os.path.exists(path)]
    targets = [f"{outputs}/{path_of(job)}" for job in to_run] if sources else []
    for later, earlier in clashes([*sources, *targets]):
        if earlier < len(sources) <= later:
            raise OutputFolderError(
                f'the result of "{to_run[later - len(sources)].custom_id}" would replace a source',
                where=sources[earlier],
                hint="choose another folder with -o, or another --name",
                code="output.source",
            )


def outputs_of(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The outputs of a result that name a file below `outputs`; a line may hold anything."""
    found = entry.get("outputs") or []
    return [one for one in found if isinstance(one, Mapping) and _is_below(one.get("path"))]


def _is_below(path: Any) -> bool:
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    return parts[:1] == (OUTPUTS,) and ".." not in parts and len(parts) > 1
