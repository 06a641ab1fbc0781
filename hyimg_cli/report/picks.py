"""What the page shows of a run's picks: of each candidate its line, values, and why it is where."""

from pathlib import Path
from typing import Any

from hyimg_cli.journal.picks import DRAFTS, read_picks


def shown_picks(folder: Path) -> dict[str, Any]:
    """The picks of a run's folder, or of the run that its drafts are of; empty where there are
    none. `scorers`: whether higher is better, by name; `jobs`: by candidate.
    """
    is_of_drafts = folder.name == DRAFTS
    picks = read_picks(folder.parent if is_of_drafts else folder)
    scorers: dict[str, bool] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for of, line in picks.items():
        for name, declared in line["rule"]["scorers"].items():
            scorers[name] = bool(declared.get("higher_is_better", True))
        count = len(line["ranking"]) + len(line["rejected"])
        for entry in (*line["ranking"], *line["rejected"]):
            values = entry["values"] if is_of_drafts else entry.get("final_values", entry["values"])
            why = [f"rank {entry['rank']} of {count}"] if "rank" in entry else entry["reasons"]
            if entry["custom_id"] in line["picked"]:
                by = " by a person" if line["chosen_by"] == "person" else ""
                state, why = "picked", [f"picked{by}", *why, *entry.get("overruled", ())]
            else:
                state = "ranked" if "rank" in entry else "rejected"
            shown = {"line": of, "state": state, "why": why, "values": values}
            jobs[entry["custom_id"]] = shown
    return {"scorers": scorers, "jobs": jobs} if jobs else {}
