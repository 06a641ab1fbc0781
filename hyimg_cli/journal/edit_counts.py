"""Count what became of the sources that the edits of a run should keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class EditCounts:
    """Counts of finished edits with `keep_outside`.

    `edits`: all of them; `whole`: the source was not kept, because the whole picture was edited;
    `unchanged`: the result is the source, because no edit was found; `gated`: beyond a gate.
    """

    edits: int = 0
    whole: int = 0
    unchanged: int = 0
    gated: int = 0

    def count_edit(self, edit: Mapping[str, Any] | None) -> None:
        """Count the `edit` of a finished job's result line; None for a job that keeps no source."""
        if edit:
            self.edits += 1
            self.whole += edit.get("kind") == "global"
            self.unchanged += edit.get("kind") == "none"
            self.gated += bool(edit.get("gates"))

    @property
    def remarks(self) -> list[str]:
        """Return what the user should look at, in the words of the summary and of the page."""
        found = [f"source not kept: {self.whole:,} of {self.edits:,}"] if self.whole else []
        found += [f"{self.unchanged:,} without an edit"] if self.unchanged else []
        return found + ([f"{self.gated:,} beyond a gate"] if self.gated else [])
