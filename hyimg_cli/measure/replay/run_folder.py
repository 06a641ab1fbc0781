"""The run folder that a file still lies in, if it does: it knows paths that the file does not say.

Everything here may be missing or of another run; who asks checks digests.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError, OutputFolderError
from hyimg_cli.files import JOURNAL_BYTES, SETTINGS_BYTES, text_of
from hyimg_cli.journal.journal import OUTPUTS, RESOLVED, RUN, RunFolder
from hyimg_cli.spec import digest

_TITLE = "replay of "


def images_there(file: Path, custom_id: str) -> list[Path]:
    """Where the run of `file` found the source images of its job, in order."""
    images = _resolved(file, custom_id).get("images")
    if not isinstance(images, list):
        return []
    return [_folder(file) / image for image in images if isinstance(image, str)]


def model_there(file: Path, custom_id: str) -> Path | None:
    """Where the run of `file` found the folder of its job's model."""
    model = _resolved(file, custom_id).get("model")
    if not isinstance(model, str) or os.sep not in model:
        return None
    place = _folder(file) / model
    return place if place.is_dir() else None


def frames_digest(film: Path) -> str:
    """Digest of the film's frames before compression, from the line that names this very file;
    empty where there is none.
    """
    try:
        results = RunFolder(_folder(film)).results() if film.parent.name == OUTPUTS else {}
        own = digest.of_file(film)
    except (OSError, HyimgError):
        return ""
    for entry in results.values():
        for output in entry.get("outputs") or ():
            if isinstance(output, dict) and output.get("sha256") == own:
                return str(output.get("pixel_sha256", ""))
    return ""


def title_of(file: Path) -> str:
    """What the replay of a file is called, in messages and in its run folder."""
    return f"{_TITLE}{file.name}"


def refuse_other_runs(folder: Path, custom_id: str) -> None:
    """Raises OutputFolderError where `folder` holds results of anything but replays of this job."""
    results = RunFolder(folder).results()
    if not results:
        return
    try:
        name = json.loads(text_of(folder / RUN, SETTINGS_BYTES))["manifest"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    if not str(name).startswith(_TITLE) or results.keys() != {custom_id}:
        raise OutputFolderError(
            "the folder holds results of another run",
            where=str(folder),
            hint="choose another folder with -o",
            code="output.other-run",
        )


def _resolved(file: Path, custom_id: str) -> dict[str, Any]:
    """The line of the job in the run's resolved manifest; nothing where there is none."""
    if file.parent.name != OUTPUTS:
        return {}
    entries = _objects(_folder(file) / RESOLVED)
    return next((entry for entry in entries if entry.get("custom_id") == custom_id), {})


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for line in text_of(path, JOURNAL_BYTES).splitlines():
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry
    except (OSError, ValueError):
        return


def _folder(file: Path) -> Path:
    return file.parent.parent
