"""Read the run folder that contains a file, if any, for paths that the file lacks.

Anything here may be missing or of another run, so callers check digests.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError, OutputFolderError, UsageError
from hyimg_cli.journal.journal import OUTPUTS, RESOLVED, RESULTS, RunFolder
from hyimg_cli.journal.past_run import object_in, past_jobs, read_run_info
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import (
    ANSWER_SUFFIX,
    DRAWN_FILES,
    EDIT_SUFFIXES,
    FORMATS,
    LAYER_MARK,
    Encoding,
)
from hyimg_cli.spec.options import MAX_LAYERS

# Precedes the file's name in the title of a replay's manifest.
TITLE = "replay of "
# The suffixes of the model's own drawings for an edit that was put back on its source.
REDRAWS = {kind: EDIT_SUFFIXES[kind] for kind, _ in DRAWN_FILES}
_SUFFIXES = (*(Encoding(kind).suffix for kind in FORMATS), *REDRAWS.values())
_SUFFIXES += (".mp4", ".json", ANSWER_SUFFIX)


def read_resolved(file: Path, custom_id: str) -> dict[str, Any]:
    """Return a job's line in its run's resolved manifest, with paths relative to `run_of`.

    Empty if the job has none.
    """
    with suppress(HyimgError):  # what is damaged or cannot be read has no line
        jobs = past_jobs(run_of(file))
        return next((dict(one.line) for one in jobs if one.custom_id == custom_id), {})
    return {}


def frames_digest(video: Path) -> str:
    """Return the digest of a video's frames before compression, from the file's line.

    Empty if no line names the file.
    """
    with suppress(OSError, HyimgError):
        own = digest.of_file(video)
        outputs = (one for job in past_jobs(run_of(video)) for one in job.outputs)
        same = (one.get("pixel_sha256", "") for one in outputs if one.get("sha256") == own)
        return str(next(same, ""))
    return ""


def refuse_folder(folder: Path, file: Path, custom_id: str) -> None:
    """Raise UsageError if a replay into `folder` would overwrite the original or its video.

    Raises OutputFolderError if the folder has results other than the file's replays.
    """
    hint = "choose another folder with -o"
    targets = [RunFolder(folder).path_for(custom_id, suffix) for suffix in _suffixes()]
    for own in (file, file.with_suffix(".mp4")):
        if own.exists() and any(one.exists() and own.samefile(one) for one in targets):
            what = "the replay would replace the file itself"
            raise UsageError(what, where=own, hint=hint, code="replay.itself")
    results = RunFolder(folder).results()
    name = object_in(read_run_info(folder), "manifest").get("name")
    if results and not (str(name).startswith(TITLE) and results.keys() == {custom_id}):
        what = "the folder holds results of another run"
        raise OutputFolderError(what, where=folder, hint=hint, code="output.other-run")


def _suffixes() -> Iterator[str]:
    yield from _SUFFIXES
    for number in range(1, MAX_LAYERS + 1):
        yield from (LAYER_MARK.format(number) + Encoding(kind).suffix for kind in FORMATS)


def run_of(file: Path) -> Path:
    """Return the folder of the run that wrote `file` below its `outputs`.

    The file's own folder if no run did.
    """
    above = [place.parent for place in file.parents if place.name == OUTPUTS]
    names = RESULTS, RESOLVED
    runs = (run for run in above if any(os.path.exists(run / name) for name in names))
    return next(runs, file.parent)
