"""The file of texts that `hyimg think` writes: a manifest with one line per finished text.

A line is on disk when `append` returns, whole or not at all, so a killed run resumes after it.
People edit these lines; existing lines are never rewritten.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import remove, replace_file
from hyimg_cli.journal.disk import disk_errors, take_lock
from hyimg_cli.journal.journal import JobFolder, bytes_if_any, json_line
from hyimg_cli.journal.journal_file import JournalFile, entry_of, lines_in, whole_lines
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.manifest.fields import AR_FIELDS
from hyimg_cli.manifest.resolved import job_to_json, lines_beside
from hyimg_cli.manifest.written import REWRITTEN, note
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec.events import Outcome
from hyimg_cli.spec.job import ImageJob, Job

# Fields that come first in a line, for people who read it.
_FIRST = ("custom_id", "prompt", "cot_text", "ratio_index")


def note_of(
    job: ImageJob, ids: Sequence[int], text: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the note on a text that a job wrote; `facts` has the key that later runs check."""
    fields = job_to_json(job)
    sampling = {name: fields[name] for name in fields if name in (*AR_FIELDS, "bot_task")}
    return note(ids, text, sampling | dict(facts))


class TextsFile(JobFolder):
    """The file at `path`. Reading needs no lock; writing needs `with`, which takes it."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        """Set the path and the jobs that may be appended; a symbolic link is followed."""
        super().__init__(path.parent)
        self._path = path.resolve() if path.is_symlink() else path
        self._jobs = {job.custom_id: job for job in jobs}
        self._held = ExitStack()
        self._file: JournalFile

    def __enter__(self) -> Self:
        with disk_errors(self._path), ExitStack() as held:
            self.folder.mkdir(parents=True, exist_ok=True)
            take_lock(self._path.with_name(f".{self._path.name}.lock"), held)
            remove(self.workshop)  # of a killed run; its texts are written again
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def workshop(self) -> Path:
        """The folder in which several processes write, until their lines are here."""
        return self._path.with_name(f".{self._path.name}.run")

    def begin(self, config: RunConfig, *, force: bool) -> list[Job]:
        """Open the file for lines; return the jobs that have none yet.

        Raises OutputFolderError if a line is from a different job with the same id; `force` removes
        that line instead.
        """
        kept = self._read()
        keys = job_keys([self._jobs[name] for name in self._jobs if name in kept], config)
        # A line without a text has no key.
        notes = {name: kept[name].get("written") or kept[name].get(REWRITTEN) for name in keys}
        others = [
            self._jobs[name]
            for name, written in notes.items()
            if isinstance(written, dict) and written.get("key") != keys[name]
        ]
        if others and not force:
            raise OutputFolderError(
                f'"{others[0].custom_id}" already has a text in {self._path.name}, written '
                "for another line, source image, model or setting",
                where=others[0].source_line,
                hint="choose another file or custom_id, or overwrite its line with --force",
                code="output.other-job",
            )
        for job in others:
            del kept[job.custom_id]
        with disk_errors(self._path):
            if others:
                replace_file(self._path, b"".join(map(json_line, kept.values())))
            self._file = self._held.enter_context(closing(JournalFile(self._path)))
        return [job for name, job in self._jobs.items() if name not in kept]

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the lines by custom_id; a last line that a kill cut off is skipped.

        Raises OutputFolderError for any other line that is not a job.
        """
        with disk_errors(self._path):
            data = bytes_if_any(self._path)
        found: dict[str, dict[str, Any]] = {}
        whole = whole_lines(data)
        is_cut_off = data.startswith(b'{"custom_id"', len(whole))
        for number, line in lines_in(whole if is_cut_off else data):
            if (entry := entry_of(line)) is None:
                raise OutputFolderError(
                    "this line is not a job",
                    where=f"{self._path.name}:{number}",
                    hint="correct it, or remove it: its text is written again",
                    code="output.damaged-texts",
                )
            found[entry["custom_id"]] = entry
        return found

    def append_as_is(self, job: Job) -> None:
        """Add the line of a job that has no text to write."""
        (line,) = lines_beside([job], self.folder)
        self._append(line)

    def append(self, outcome: Outcome) -> Outcome:
        """Add the job with its text, as a line of a manifest.

        A failed job has no line: the next run tries it again.
        """
        job = self._jobs[outcome.custom_id]
        if outcome.status == "done" and isinstance(job, ImageJob):
            self._append(self._line_of(job, outcome))
        return outcome

    def _line_of(self, job: ImageJob, outcome: Outcome) -> dict[str, Any]:
        text, ids = outcome.cot_text, outcome.cot_token_ids
        assert text is not None, "the job wrote its text"
        if not job.writes_text:  # its prompt was rewritten
            (line,) = lines_beside([job], self.folder)
            note = {"prompt": job.prompt, "key": outcome.key, **(outcome.written or {})}
            return line | {"prompt": text, REWRITTEN: note}
        assert ids is not None, "and has its tokens"
        (line,) = lines_beside([replace(job, cot_token_ids=ids)], self.folder)
        line["cot_text"] = text
        if job.size.is_auto and outcome.ratio_index is not None:
            line["ratio_index"] = outcome.ratio_index
        line["cot_token_ids"] = line.pop("cot_token_ids")  # after the fields that people read
        line["written"] = note_of(job, ids, text, {"key": outcome.key, **(outcome.written or {})})
        return {name: line[name] for name in _FIRST if name in line} | line

    def _append(self, line: Mapping[str, Any]) -> None:
        with disk_errors(self._path):
            self._file.append([json_line(line)])
