"""The folder that a replica's session writes into: the run moves its files to where they belong."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hyimg_cli.journal.journal import OUTPUTS, FinishedJob, JobFolder
from hyimg_cli.spec.events import Outcome


class ReplicaFolder(JobFolder):
    """`OUT/.replica-N`, with files named as in OUT; an unfinished video's latents are in OUT."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, run=folder.parent)
        (folder / OUTPUTS).mkdir(parents=True, exist_ok=True)
        self._untold: dict[str, Outcome] = {}

    def append(self, outcome: Outcome) -> None:
        self._untold[outcome.custom_id] = outcome

    def note_told(self, outcome: Outcome) -> None:
        """The run hears of an outcome by its event."""
        self._untold.pop(outcome.custom_id, None)

    def take_untold(self) -> list[Outcome]:
        """Outcomes without an event."""
        untold, self._untold = self._untold, {}
        return list(untold.values())

    def store(self, finished: Sequence[FinishedJob]) -> None:
        raise NotImplementedError("a replica tells the run what it made")

    def drop_latents(self, jobs: Iterable[str]) -> None:
        """Nothing: the run does, once the job's line is on disk."""
