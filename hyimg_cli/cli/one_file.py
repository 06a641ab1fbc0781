"""One result as one file: `-o b.png`.

The run has a folder under `runs`, as every run, so it resumes; its result is copied to the file.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import scheme_of
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import OutputFolderError, UsageError
from hyimg_cli.files import replacing, storage_error
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import outputs_of
from hyimg_cli.manifest.source_ids import in_id
from hyimg_cli.settings.config import Setting, as_given
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import Format, Job, VideoJob
from hyimg_cli.spec.units import counted

_FORMATS: dict[str, Format] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
_VIDEO = ".mp4"
_HINT = "name a folder with -o to keep several results"


@dataclass
class OneFile:
    """The file that a command line names for its only result; `custom_id`: of that, once known."""

    path: Path
    force: bool
    custom_id: str = field(default="", init=False)

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> "OneFile | None":
        """Return the file that `-o` names; None for a folder, which may have any name."""
        name = given.get("output_dir")
        if not name or scheme_of(str(name)) or Path(name).is_dir():
            return None
        path = Path(name)
        known = path.suffix.lower() in (*_FORMATS, _VIDEO)
        return cls(path, bool(given.get("force"))) if known else None

    @property
    def folder(self) -> Path:
        """Return the run's folder, named after the file."""
        return Path("runs") / in_id("-".join(self.path.with_suffix("").parts).strip("-./"))

    def settings(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Return a run's settings with the file's format.

        Raises UsageError if another one is given, or if there would be candidates to choose from.
        """
        for name in ("score", "draft_steps"):
            if settings[name].value:
                what = f"{as_given(settings[name])} makes candidates, and {self.path} is one file"
                raise self._refused(what, _HINT)
        wanted, given = _FORMATS.get(self.path.suffix.lower()), settings["format"]
        if wanted is None:
            return dict(settings)
        if given.origin == "flag" and given.value != wanted:
            what = f"{as_given(given)} {given.value} and {self.path} are different formats"
            raise self._refused(what, "remove one of the two")
        return {**settings, "format": Setting("format", wanted, "flag")}

    def checked(self, request: RunRequest) -> RunRequest:
        """Return the request, which is refused unless it has one result and the file is free."""
        change = request.change

        def only(jobs: Sequence[Job]) -> Sequence[Job]:
            jobs = change(jobs)
            self._refuse(jobs)
            return jobs

        return replace(request, change=only)

    def write(self) -> bool:
        """Copy the run's result to the file; return False if the job has none."""
        entry = self._entry()
        if entry.get("status") != "done":
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                shutil.copyfile(self.folder / outputs_of(entry)[0]["path"], temporary)
        except OSError as error:
            raise storage_error(error, self.path.parent) from None
        return True

    def _entry(self) -> Mapping[str, Any]:
        return run_folder(self.folder).results().get(self.custom_id, {})

    def _refuse(self, jobs: Sequence[Job]) -> None:
        if len(jobs) != 1:
            what = f"{self.path} is one file, and the run makes {counted(len(jobs), 'result')}"
            raise self._refused(what, _HINT)
        (job,) = jobs
        self.custom_id, is_film = job.custom_id, self.path.suffix.lower() == _VIDEO
        if isinstance(job, VideoJob) != is_film:
            kind = "a video, whose file ends in .mp4" if not is_film else "a picture"
            raise self._refused(f"the result is {kind}", "name another file with -o")
        if not self.path.exists():
            return
        if any(Path(name).exists() and self.path.samefile(name) for name in job.images):
            what, hint = "the result would overwrite its source", "name another file with -o"
            raise OutputFolderError(what, where=self.path, hint=hint, code="output.source")
        written = [one["sha256"] for one in outputs_of(self._entry())[:1]]
        if not self.force and digest.of_bytes(self.path.read_bytes()) not in written:
            what, hint = "the file already exists", "overwrite it with --force, or name another"
            raise UsageError(what, where=self.path, hint=hint, code="usage.exists")

    def _refused(self, what: str, hint: str) -> UsageError:
        return UsageError(what, where="-o", hint=hint, code="usage.one-file")
