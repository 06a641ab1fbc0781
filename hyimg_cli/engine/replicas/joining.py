"""Join a run of several processes from another machine, or from another terminal of this one.

The command that began a run writes into `pieces/plan.json` how it cut the plan. The same command,
started anywhere where the folder can be seen, takes pieces beside it. It is the same command if it
gives the same resolved lines, and the same keys for the first job of each group.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyimg_cli.engine.replicas.pieces import with_jobs
from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import json_of
from hyimg_cli.journal.journal import PLAN, PREPARING, RESOLVED, RunFolder, json_line
from hyimg_cli.journal.keys import job_keys
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.manifest.resolved import lines_beside
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import Job
from hyimg_cli.spec.plan import Plan

# Seconds between looks at a command that prepares, and for which its plan may be missing.
_LOOK_S, _MISSING_S = 0.2, 2.0


@dataclass(frozen=True)
class SharedWork:
    """What all commands of a run agree on: its pieces, and what was there before them.

    `attempts`: how often jobs were tried before; `former`: files of earlier results.
    """

    pieces: tuple[Plan, ...]
    attempts: Mapping[str, int]
    former: Mapping[str, list[str]]

    @property
    def jobs(self) -> list[Job]:
        return [job for piece in self.pieces for job in piece.jobs]

    def is_left(self, job: Job, attempts: Mapping[str, int]) -> bool:
        """Return True if a job has not ended in this run, by how often it was tried so far."""
        return attempts.get(job.custom_id, 0) <= self.attempts.get(job.custom_id, 0)

    def to_json(self, folder: RunFolder, config: RunConfig) -> bytes:
        """Return what another command needs to join, and to know that it is the same one."""
        firsts: dict[tuple[str, str], Job] = {}
        for piece in self.pieces:
            group = piece.groups[0]
            firsts.setdefault((group.model, group.size_class), piece.jobs[0])
        resolved = folder.folder / RESOLVED
        about = {
            "resolved": digest.of_file(resolved) if resolved.is_file() else "",
            "keys": job_keys([*firsts.values()], config),
            "pieces": [[job.custom_id for job in piece.jobs] for piece in self.pieces],
            "attempts": self.attempts,
            "former": self.former,
        }
        return json.dumps(about).encode()


def find_work(
    folder: RunFolder,
    every: Sequence[Job],
    config: RunConfig,
    card_of: Callable[[str], ModelCard],
    still_in_use: Callable[[], bool],
) -> SharedWork | None:
    """Return the work of the run in `folder` if it is of the same command; None if it cannot join.

    Waits for a command that prepares its run; None if it has ended, or does not share its work.
    Raises OutputFolderError if the run is of another manifest, model or setting.
    """
    found = _wait_for_plan(folder, still_in_use)
    if not found:
        return None
    lines = map(json_line, lines_beside(every, folder.place))
    by_id = {job.custom_id: job for job in every}
    firsts = [by_id[name] for name in found["keys"] if name in by_id]
    if digest.of_parts(lines) != found["resolved"] or job_keys(firsts, config) != found["keys"]:
        raise OutputFolderError(
            "another run is writing to this folder, of another manifest, model or setting",
            where=folder.place,
            hint="give the same command to join it, wait for it, or choose another folder",
            code="output.in-use",
        )
    pieces = []
    for names in found["pieces"]:
        jobs = [by_id[name] for name in names]
        plan = make_plan(jobs, card_of)
        assert len(plan.groups) == 1, "a piece has jobs of one group"
        pieces.append(with_jobs(plan, jobs))  # in the order of the command that cut it
    return SharedWork(tuple(pieces), found["attempts"], found["former"])


def _wait_for_plan(folder: RunFolder, still_in_use: Callable[[], bool]) -> dict[str, Any]:
    missing_at = time.monotonic()
    while still_in_use():
        data = folder.read_note(PLAN)
        if data and data != PREPARING:
            return dict(json_of(data))
        if data:
            missing_at = time.monotonic()
        elif time.monotonic() - missing_at > _MISSING_S:
            break
        time.sleep(_LOOK_S)
    return {}
