"""Picks on the report page: each candidate's line, values, and the reason for its rank."""

from pathlib import Path
from typing import Any

from hyimg_cli.journal.picks import DRAFTS, read_picks, verdicts_of


def shown_picks(folder: Path) -> dict[str, Any]:
    """Return the picks of a run; `folder` may also be the folder of its drafts.

    Empty if nothing was picked. `scorers`: True by name if higher is better. `jobs`: by candidate.
    """
    is_of_drafts = folder.name == DRAFTS
    place = folder.parent if is_of_drafts else folder
    picks = read_picks(place)
    jobs = {
        name: {
            "line": one.of,
            "state": one.state,
            "why": [
                *([f"picked{' by a person' * one.is_by_person}"] * (one.state == "picked")),
                *one.why,
            ],
            "values": one.values if is_of_drafts else one.final_values or one.values,
        }
        for name, one in verdicts_of(picks, place).items()
    }
    scorers = {
        name: bool(declared.get("higher_is_better", True))
        for line in picks.values()
        for name, declared in line["rule"]["scorers"].items()
    }
    return {"scorers": scorers, "jobs": jobs} if jobs else {}
