"""Picks on the report page: each candidate's line, values, and the reason for its rank."""

from pathlib import Path
from typing import Any

from hyimg_cli.journal.journal import PAGE, RunFolder
from hyimg_cli.journal.picks import CANDIDATES, DRAFTS, PICKS, read_picks, verdicts_of


def is_of_drafts(folder: Path) -> bool:
    """Return True for the folder of a run's drafts, not for a run that has the same name."""
    run = folder.parent / CANDIDATES
    return folder.name == DRAFTS and run.is_file() and not (folder / CANDIDATES).is_file()


def other_run(folder: Path) -> dict[str, Any] | None:
    """Return the page of a run's drafts, or of the run that drafts are for; None without one.

    `failed`: its failed jobs, since the command fails with either. Raises OutputFolderError.
    """
    if is_of_drafts(folder):
        link, text = "..", "These are drafts; the picked ones in full"
    else:
        link, text = DRAFTS, "The drafts of all candidates"
    if not (folder / link / PAGE).is_file():
        return None
    results = RunFolder(folder / link).results().values()
    failed = sum(one.get("status") == "failed" for one in results)
    return {"link": f"{link}/{PAGE}", "text": text, "failed": failed}


def awaits_picks(folder: Path) -> bool:
    """Return True if a run draws candidates that have not been scored and picked."""
    place = folder.parent if is_of_drafts(folder) else folder
    return (place / CANDIDATES).is_file() and not (place / PICKS).is_file()


def shown_picks(folder: Path) -> dict[str, Any]:
    """Return the picks of a run; `folder` may also be the folder of its drafts.

    Empty if nothing was picked. `scorers`: True by name if higher is better. `jobs`: by candidate.
    `poor`: the lines without an accepted candidate. `run`: the run's folder, as seen from here.
    """
    is_draft = is_of_drafts(folder)
    place = folder.parent if is_draft else folder
    picks = read_picks(place)
    jobs = {
        name: {
            "line": one.of,
            "state": one.state,
            "why": [
                *([f"picked{' by a person' * one.is_by_person}"] * (one.state == "picked")),
                *one.why,
            ],
            "values": one.values if is_draft else one.final_values or one.values,
        }
        for name, one in verdicts_of(picks, place).items()
    }
    scorers = {
        name: bool(declared.get("higher_is_better", True))
        for line in picks.values()
        for name, declared in line["rule"]["scorers"].items()
    }
    poor = [of for of, one in picks.items() if not {*one["picked"]} - {*one.get("missing", ())}]
    shown = {"scorers": scorers, "jobs": jobs, "poor": poor, "run": ".." if is_draft else "."}
    return shown if picks else {}
