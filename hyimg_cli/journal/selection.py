"""Which jobs are selected, by id and by result: `cat-*`, `status=failed`, `outside>0.1`.

An id has none of the signs of a condition, so no pattern for ids is one.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.candidates import Candidate, values_of
from hyimg_cli.journal.edit_facts import seam_level
from hyimg_cli.journal.past_run import PastJob, past_jobs
from hyimg_cli.journal.picks import SCORES, ScoresFile
from hyimg_cli.settings.values import nearest, shown

Facts = Mapping[str, str | float]
_CONDITION = re.compile(r"\s*([A-Za-z][\w.-]*?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_EQUAL, _SCORE = ("=", "==", "!="), "score."
STATES = ("done", "failed", "left")
# Facts of a job that has no result.
LEFT: Facts = {"status": "left", "attempt": 0, "warnings": 0}
# What can be compared, with what it is.
TEXTS = ("status", "code", "kind")
NUMBERS = ("outside", "area", "spill", "seam", "gates", "warnings", "attempt", "seconds")
_HINT = f"compare {', '.join((*TEXTS, *NUMBERS))}, or score.NAME; or give a pattern for ids"


@dataclass(frozen=True)
class Condition:
    """A comparison of a fact of a job's result. A job without the fact does not meet it.

    Except for `!=`, which is met by every job that does not have this text.
    """

    name: str
    sign: str
    value: str

    def is_met(self, facts: Facts) -> bool:
        """Return True if the facts meet the condition."""
        if self.name in TEXTS:
            given = str(facts.get(self.name, ""))
            is_one = any(fnmatchcase(given, one.strip()) for one in self.value.split(","))
            return is_one == (self.sign != "!=")
        known = facts.get(self.name)
        return known is not None and _SIGNS[self.sign](float(known), float(self.value))

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value}"

    @property
    def is_of_failures(self) -> bool:
        """True if it names failed jobs, which are then to be run again."""
        return self.name == "code" or (
            self.name == "status" and self.is_met({"status": "failed"}) and self.sign != "!="
        )


@dataclass(frozen=True)
class Chosen:
    """What --select asks for: a job must match a pattern, if there is one, and all conditions."""

    patterns: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def retries(self) -> bool:
        """True if failed jobs are asked for, so that they run again."""
        return any(one.is_of_failures for one in self.conditions)

    def takes(self, custom_id: str, facts: Facts = LEFT) -> bool:
        """Return True if a job with this id and these facts is selected."""
        return all(
            any(fnmatchcase(custom_id, one) for one in pattern.split(","))
            for pattern in self.patterns
        ) and all(one.is_met(facts) for one in self.conditions)


def chosen(texts: Iterable[str]) -> Chosen:
    """Return what texts of --select ask for. Raises UsageError for a condition without meaning."""
    patterns, conditions = list[str](), list[Condition]()
    for text in texts:
        if (found := _CONDITION.fullmatch(text)) is None:
            patterns.append(text)
        else:
            conditions.append(_condition(text, *found.groups()))
    return Chosen(tuple(patterns), tuple(conditions))


def facts_in(folder: Path) -> dict[str, Facts]:
    """Return the facts of each job with a result in a run's folder, here or in a store, by id.

    Empty without a run. Raises OutputFolderError for a damaged folder.
    """
    run = run_folder(folder)
    if not run.is_run:
        return {}
    with suppress(FileNotFoundError):  # of a run at an address
        run.fetch(SCORES)
    file = ScoresFile(run.folder)
    return {job.custom_id: _facts_of(job, file) for job in past_jobs(folder) if job.result}


def selected_in(folder: Path, texts: Sequence[str]) -> set[str]:
    """Return the ids of the jobs of a finished run that texts of --select take.

    Raises UsageError as `chosen` does, and if there is none.
    """
    asked, facts = chosen(texts), facts_in(folder)
    names = dict.fromkeys([*(job.custom_id for job in past_jobs(folder)), *facts])
    if found := {name for name in names if asked.takes(name, facts.get(name, LEFT))}:
        return found
    what = f"--select {' '.join(texts)} takes none of {len(names)} jobs"
    raise UsageError(what, where=folder, hint="hyimg status counts its results")


def _condition(text: str, name: str, sign: str, value: str) -> Condition:
    fault = f"--select {shown(text)} is not a condition"
    if name not in (*TEXTS, *NUMBERS) and not name.startswith(_SCORE):
        close = nearest(name, (*TEXTS, *NUMBERS))
        guess = f"did you mean {close}? " if close else ""
        raise UsageError(fault, hint=guess + _HINT, code="usage.select")
    if name in TEXTS:
        hint = f"write {name}=… or {name}!=…"
        if name == "status" and not all(one.strip() in STATES for one in value.split(",")):
            sign, hint = "", f"write status={', status='.join(STATES)}"
        if sign not in _EQUAL or not value:
            raise UsageError(fault, hint=hint, code="usage.select")
        return Condition(name, sign, value)
    try:
        float(value)
    except ValueError:
        hint = f"compare it with a number, such as {name}>0.1"
        raise UsageError(fault, hint=hint, code="usage.select") from None
    return Condition(name, sign, value)


def _facts_of(job: PastJob, file: ScoresFile) -> Facts:
    result = job.result
    edit: Mapping[str, Any] = result.get("edit") or {}
    found: dict[str, Any] = {
        "status": result.get("status"),
        "code": (result.get("error") or {}).get("code"),
        "kind": edit.get("kind"),
        "outside": (edit.get("change") or {}).get("mean_de"),
        "area": edit.get("area"),
        "spill": edit.get("spill"),
        "seam": seam_level(edit) if edit else None,
        "gates": len(edit.get("gates") or ()),
        "warnings": len(result.get("warnings") or ()),
        "attempt": result.get("attempt"),
        "seconds": (result.get("share_s") or {}).get("total"),
    }
    if file.declared and job.line:
        one = Candidate(job.line, result, job.folder)
        values = values_of(one, file.scores, file.declared)
        found |= {f"{_SCORE}{name}": value for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}
