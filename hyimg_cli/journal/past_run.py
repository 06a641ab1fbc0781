"""A run's folder read without its lock; its results come from `RunFolder.results`.

Any part may be missing, damaged, or of another run: who asks checks.
"""

import json
from pathlib import Path
from typing import Any

from hyimg_cli.journal.journal import RESOLVED, RUN, RunFolder

_FRAME = " frame "


def read_run_info(folder: Path) -> dict[str, Any]:
    """The object of run.json; empty where there is none."""
    return next(iter(_objects(folder / RUN, whole=True)), {})


def resolved_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of manifest.resolved.jsonl by custom_id, in order; none where there is no file."""
    lines = _objects(folder / RESOLVED)
    return {line["custom_id"]: line for line in lines if isinstance(line.get("custom_id"), str)}


def output_files(folder: Path, *, by_frame: bool = False) -> dict[str, Path]:
    """The files of all finished jobs by custom_id; a second one of a job is `id[1]`.

    `by_frame`: in place of a video its PNG files, where it has some, as `id frame 0000`.
    """
    found: dict[str, Path] = {}
    for name, entry in RunFolder(folder).results().items():
        outputs = entry.get("outputs") or () if entry.get("status") == "done" else ()
        for number, output in enumerate(outputs):
            if by_frame and output.get("frames_path"):
                frames = sorted((folder / output["frames_path"]).glob("*.png"))
                found |= {f"{name}{_FRAME}{n:04}": path for n, path in enumerate(frames)}
            else:
                found[f"{name}[{number}]" if number else name] = folder / output["path"]
    return found


def job_of(name: str) -> str:
    """The job that a frame of `output_files` is of; of any other name, the name."""
    return name.partition(_FRAME)[0]


def _objects(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The JSON objects on the lines of a file, or of the `whole` file, up to any damage."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
        for part in [text] if whole else text.split("\n"):
            if part.strip() and isinstance(entry := json.loads(part), dict):
                found.append(entry)
    except (OSError, ValueError):
        pass
    return found
