"""The finished pictures of runs, each with its scores and with what `hyimg pick` decided about it.

A run without picks.jsonl has no rule: all of its finished pictures are accepted. Answers have no
scores, and no rule is about them: all are accepted.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyimg_cli.addresses import shown_place
from hyimg_cli.errors import UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.candidates import Candidate, values_of
from hyimg_cli.journal.journal import RESULTS, RunFolder, outputs_of
from hyimg_cli.journal.past_run import PastJob, object_in, past_jobs, read_run_info
from hyimg_cli.journal.picks import (
    CHOICES,
    PICKS,
    SCORES,
    CandidateVerdict,
    ScoresFile,
    read_picks,
    uncounted_choices,
    verdicts_of,
)
from hyimg_cli.journal.selection import selected_in
from hyimg_cli.manifest.resolved import lines_moved
from hyimg_cli.spec.job import TEXT_TASKS

Entry = Mapping[str, Any]
NOT_SEEN = "not in the last pick: run hyimg pick again"
NOT_COUNTED = "a choice was made after the last pick: run hyimg pick again"
NOT_JUDGED = "drawn in full after the last pick: run hyimg pick again"
_OF_FILE = {"path", "sha256"}
_OF_OUTPUT = _OF_FILE | {"pixel_sha256", "seed"}
_OF_LINE = {"task", "prompt", "model"}


@dataclass(frozen=True)
class Finished(PastJob):
    """A finished picture or answer. `scores`: by scorer, and by SCORER.PART.

    Paths of its line are relative to the working folder. `id`: its custom_id; if several runs have
    that id and drew it differently, also its key.
    """

    id: str
    run: RunFolder
    revision: str | None
    is_accepted: bool = True
    reasons: tuple[str, ...] = ()
    rank: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        """True if its file is a text."""
        return self.line.get("task") in TEXT_TASKS

    @property
    def group(self) -> str:
        """The line that it is a candidate of; its own id if the line has one result."""
        return str(self.result.get("candidate_of") or self.result["custom_id"])


@dataclass
class RunContents:
    """The contents of runs.

    `left_out`: number of results without a row, by reason. `rules`: the rules that picked.
    `scorers`: what is declared of each.
    """

    finished: list[Finished] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    rules: list[Entry] = field(default_factory=list)
    scorers: dict[str, Entry] = field(default_factory=dict)


def find_finished(places: Sequence[Path], select: Sequence[str] = ()) -> RunContents:
    """Return all finished pictures and answers in run folders, in the order of their manifests.

    `select`: texts of --select, which leave out the others. Raises UsageError for a folder without
    a run, OutputFolderError for a damaged one.
    """
    found = RunContents()
    by_id: dict[str, dict[str, Finished]] = {}
    for place in places:
        if not (run := run_folder(place)).is_run:
            raise UsageError(
                "this is not the output folder of a run",
                where=shown_place(place),
                hint=f"name the -o of hyimg generate, which has {RESULTS}",
                code="usage.no-run",
            )
        taken = selected_in(place, select) if select else None
        for one in _finished_in(run, found, taken):
            same = by_id.setdefault(one.id, {})
            found.left_out["the same job is in another run"] += str(one.result.get("key")) in same
            same.setdefault(str(one.result.get("key")), one)
    for name, by_key in by_id.items():
        for key, one in by_key.items():
            own = name if len(by_key) == 1 else f"{name}@{key[:8]}"
            found.finished.append(replace(one, id=own))
    found.left_out += Counter()  # drops zeros
    return found


def _finished_in(
    run: RunFolder, found: RunContents, taken: Collection[str] | None
) -> Iterator[Finished]:
    for name in (PICKS, SCORES, CHOICES):  # of a run at an address
        with suppress(FileNotFoundError):
            run.fetch(name)
    file = ScoresFile(run.folder)
    scored = file.means()
    picks, info = read_picks(run.folder), read_run_info(run.place)
    verdicts, uncounted = verdicts_of(picks, run.folder), uncounted_choices(run.folder, picks)
    revision = object_in(object_in(info, "flags"), "revision").get("value")
    for pick in picks.values():
        rule = object_in(pick, "rule")
        found.scorers |= rule.pop("scorers", None) or {}
        if rule and rule not in found.rules:
            found.rules.append(rule)
    jobs = [one for one in past_jobs(run.place) if one.result]
    lines = lines_moved((one.line for one in jobs), run.place, Path())
    for job, line in zip(jobs, lines, strict=True):
        is_taken = taken is None or job.custom_id in taken
        if why := _why_left_out(job.result, line) if is_taken else "not selected":
            found.left_out[why] += 1
            continue
        # Scores as they are now: scorers may have run after the pick, or without one.
        scores = values_of(Candidate(job.line, job.result, run.folder), scored, file.declared)
        for scorer in file.declared.keys() & scores.keys():
            declared = file.declared[scorer]
            found.scorers[scorer] = {"identity": declared["identity"]} | declared["declared"]
        name = job.custom_id
        one = Finished(line, job.result, job.folder, name, run, revision, scores=scores)
        if one.is_answer:
            yield one
        elif one.group in uncounted:
            yield replace(one, is_accepted=False, reasons=(NOT_COUNTED,))
        else:
            yield _judged(one, verdicts.get(name)) if picks else one


def _why_left_out(result: Entry, line: Entry) -> str:
    """Return why a result has no row; empty if it has one."""
    if result.get("draft_of"):
        return "a draft"
    if result.get("status") != "done":
        return "failed"
    is_answer = line.get("task") in TEXT_TASKS
    if is_answer and not isinstance(result.get("answer"), str):
        return "without an answer"
    outputs = outputs_of(result)
    if not outputs or not outputs[0].keys() >= (_OF_FILE if is_answer else _OF_OUTPUT):
        return "without a file"
    if not line.keys() >= _OF_LINE:
        return "its line is not in manifest.resolved.jsonl any more"
    return "a video" if outputs[0]["path"].endswith(".mp4") else ""


def _judged(one: Finished, verdict: CandidateVerdict | None) -> Finished:
    """Return a picture with what picks.jsonl records about it."""
    if verdict is None:
        return replace(one, is_accepted=False, reasons=(NOT_SEEN,))
    is_accepted, reasons = verdict.state == "picked", verdict.why
    if verdict.is_missing:
        is_accepted, reasons = False, (NOT_JUDGED,)
    elif is_accepted:
        reasons = ("chosen by a person",) if verdict.is_by_person else ()
    picked = {n: v for n, v in (verdict.final_values or verdict.values).items() if v is not None}
    scores = picked | dict(one.scores)
    return replace(one, is_accepted=is_accepted, reasons=reasons, rank=verdict.rank, scores=scores)
