"""How far a run is, by the files of its folder alone, and the command line that goes on with it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import shown_place
from hyimg_cli.journal.bucket import existing_run
from hyimg_cli.journal.edit_counts import EditCounts
from hyimg_cli.journal.journal import RESOLVED
from hyimg_cli.journal.past_run import object_in, past_jobs, read_run_info
from hyimg_cli.settings.kinds import FOLDER, RUN_FOLDER
from hyimg_cli.settings.table import SETTINGS, Declaration

# Origins of values that the next run takes by itself.
_NOT_GIVEN = ("default", "model", None)


@dataclass(frozen=True)
class RunStatus:
    """The counts of a run's folder.

    `failed_by`: the failed jobs by error code. `invalid`: those of them that are lines of the
    manifest which did not become jobs. `is_running`: a process writes to the folder.
    `settings`: what run.json records of each setting; empty before the first job.
    """

    folder: Path
    done: int
    failed: int
    left: int
    failed_by: Counter[str]
    invalid: int
    edits: EditCounts
    warned: int
    is_running: bool
    settings: dict[str, Any]

    @property
    def needs_attention(self) -> bool:
        """True if a job failed, is left, or is beyond a gate."""
        return bool(self.failed or self.left or self.edits.gated)

    def next_command(self) -> list[str]:
        """Return the words of the command that goes on with the run, from any working folder.

        The lines are in the folder, with every value filled in; the flags are those that lines do
        not hold. Empty if nothing is left to do, if the run works now, or if only its own command
        goes on with it: one that picks candidates, or one whose invalid lines are corrected.
        """
        retries = self.failed > self.invalid
        values = {name: object_in(self.settings, name) for name in self.settings}
        is_picked = any(
            values[name].get("origin") not in _NOT_GIVEN
            for name, row in SETTINGS.items()
            if row.table == "candidates" and name in values
        )
        if self.is_running or is_picked or not (retries or self.left):
            return []
        place = shown_place(self.folder)
        words = ["hyimg", "generate", shown_place(self.folder / RESOLVED), "-o", place]
        for name, row in SETTINGS.items():
            if _is_of_the_run(row) and values.get(name, {}).get("origin") not in _NOT_GIVEN:
                words += _flag(row, values[name].get("value"))
        return [*words, *(["--retry-failed"] if retries else [])]


def status_of(folder: Path) -> RunStatus:
    """Return the status of a run's folder, here or in a store; needs no lock.

    Raises UsageError for a folder without a run, and OutputFolderError for a damaged one.
    """
    run = existing_run(folder)
    ends, codes, edits, warned, invalid = Counter[str](), Counter[str](), EditCounts(), 0, 0
    for job in past_jobs(folder):
        ends[str(job.result.get("status", "left"))] += 1
        if job.is_done:
            edits.count_edit(job.result.get("edit"))
            warned += bool(job.result.get("warnings"))
        elif error := job.result.get("error"):
            codes[str(error.get("code"))] += 1
            invalid += not job.line
    flags = object_in(read_run_info(folder), "flags")
    return RunStatus(
        folder,
        done=ends["done"],
        failed=ends["failed"],
        left=ends["left"],
        failed_by=codes,
        invalid=invalid,
        edits=edits,
        warned=warned,
        is_running=run.is_locked,
        settings=flags,
    )


def _is_of_the_run(row: Declaration) -> bool:
    """Return True for a setting with a flag that neither lines nor this machine decide.

    run.json has no folders of absolute paths, so flags of folders are left out.
    """
    is_in_lines = row.in_line or row.name in ("model", "components", "video_model")
    return bool(row.panel) and not is_in_lines and row.kind not in (FOLDER, RUN_FOLDER)


def _flag(row: Declaration, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        on, _, off = row.spelled[-1].partition("/")
        if value or off:
            yield on if value else off
    elif value is not None:
        yield row.flag
        yield ",".join(map(str, value)) if isinstance(value, list) else str(value)
