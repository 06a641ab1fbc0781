"""The finished pictures of runs, each with what `hyimg pick` decided about it.

A run without picks.jsonl has no rule: all of its finished pictures are accepted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hyimg_cli.addresses import shown_place
from hyimg_cli.errors import OutputFolderError, UsageError
from hyimg_cli.journal.bucket import run_folder
from hyimg_cli.journal.journal import RESULTS, RunFolder, outputs_of
from hyimg_cli.journal.past_run import object_in, read_run_info, resolved_jobs
from hyimg_cli.journal.picks import PICKS, read_picks
from hyimg_cli.manifest.resolved import lines_moved

Entry = Mapping[str, Any]
NOT_SEEN = "not picked from: run hyimg pick again"
_OF_OUTPUT = {"path", "sha256", "pixel_sha256", "seed"}
_OF_LINE = {"task", "prompt", "model"}
NOT_JUDGED = "not judged since it was drawn in full: run hyimg pick again"


@dataclass(frozen=True)
class Verdict:
    """What a rule made of a candidate. `scores`: by scorer, and by scorer and part."""

    is_accepted: bool
    reasons: tuple[str, ...] = ()
    rank: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Ranked:
    """A candidate in picks.jsonl. Of a draft `final_values` are those of the picture in full."""

    custom_id: str
    rank: int | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    final_values: dict[str, float | None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


@dataclass
class _Pick:
    """A line of picks.jsonl, as far as an export reads it."""

    picked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    chosen_by: str = "rule"
    ranking: list[_Ranked] = field(default_factory=list)
    rejected: list[_Ranked] = field(default_factory=list)
    rule: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A finished picture. `line`: its job as resolved, its paths leading from the working folder.
    `id`: its custom_id, and of several runs that share one and drew it differently, its key too.
    """

    id: str
    run: RunFolder
    line: Entry
    result: Entry
    verdict: Verdict
    model_sha256: str
    revision: str | None

    @property
    def group(self) -> str:
        """The line whose candidate it is; its own id where there is one result alone."""
        return str(self.result.get("candidate_of") or self.result["custom_id"])


@dataclass
class Found:
    """What runs hold. `left_out`: how many results have no row, by reason; `rules`: those that
    chose; `scorers`: what is declared of each.
    """

    candidates: list[Candidate] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    rules: list[Entry] = field(default_factory=list)
    scorers: dict[str, Entry] = field(default_factory=dict)


def find_candidates(places: Sequence[Path]) -> Found:
    """Every finished picture in the folders of runs, in the order of these and of their manifests.

    Raises UsageError for a folder without a run, OutputFolderError for a damaged one.
    """
    found = Found()
    for place in places:
        run = run_folder(place)
        if not run.is_run:
            raise UsageError(
                "this folder does not hold a run",
                where=shown_place(place),
                hint=f"name the -o of hyimg generate; it holds {RESULTS}",
                code="usage.no-run",
            )
        found.candidates += _candidates_of(run, found)
    keys: dict[str, dict[str, Candidate]] = {}
    for one in found.candidates:
        keys.setdefault(one.id, {}).setdefault(str(one.result.get("key")), one)
    distinct = [
        replace(one, id=f"{name}@{key[:8]}") if len(by_key) > 1 else one
        for name, by_key in keys.items()
        for key, one in by_key.items()
    ]
    found.left_out["the same job is in another run"] = len(found.candidates) - len(distinct)
    found.candidates = distinct
    found.left_out += Counter()  # drops zeros
    return found


def _candidates_of(run: RunFolder, found: Found) -> Iterator[Candidate]:
    results, picks, info = run.results(), _read_picks(run), read_run_info(run.place)
    jobs = dict(resolved_jobs(run.place))
    lines = dict(zip(jobs, lines_moved(jobs.values(), run.place, Path()), strict=True))
    models = object_in(info, "models")
    revision = object_in(object_in(info, "flags"), "revision").get("value")
    for pick in picks.values():
        rule = dict(pick.rule)
        found.scorers |= rule.pop("scorers", None) or {}
        if rule and rule not in found.rules:
            found.rules.append(rule)
    for name in [*(one for one in jobs if one in results), *(results.keys() - jobs.keys())]:
        result, line = results[name], lines.get(name)
        if why := _why_left_out(result, line):
            found.left_out[why] += 1
            continue
        assert line is not None
        model = str(jobs[name].get("model", ""))
        sha256 = result.get("model_sha256") or models.get(model) or models.get(Path(model).name)
        verdict = _verdict(result, picks)
        yield Candidate(name, run, line, result, verdict, str(sha256 or ""), revision)


def _why_left_out(result: Entry, line: Entry | None) -> str:
    """Why a result has no row; empty where it has one."""
    if result.get("draft_of"):
        return "a draft"
    if result.get("status") != "done":
        return "failed"
    outputs = outputs_of(result)
    if not outputs or not outputs[0].keys() >= _OF_OUTPUT:
        return "without a file"
    if line is None or not line.keys() >= _OF_LINE:
        return "its line is not in manifest.resolved.jsonl any more"
    return "a video" if outputs[0]["path"].endswith(".mp4") else ""


def _read_picks(run: RunFolder) -> dict[str, _Pick]:
    """What was picked from each line; empty where nothing was. Raises OutputFolderError."""
    with suppress(FileNotFoundError):
        run.fetch(PICKS)  # of a run at an address
    picks = read_picks(run.folder)
    try:
        return TypeAdapter(dict[str, _Pick]).validate_python(picks)
    except ValidationError as error:
        place, *field = error.errors()[0]["loc"]
        raise OutputFolderError(
            f"{PICKS} is damaged: {'.'.join(map(str, field))} of {place}",
            where=shown_place(run.place),
            hint="hyimg pick writes it again",
            code="output.damaged",
        ) from None


def _verdict(result: Entry, picks: Mapping[str, _Pick]) -> Verdict:
    """What picks.jsonl says of a result."""
    if not picks:
        return Verdict(True)
    name = result["custom_id"]
    pick = picks.get(result.get("candidate_of") or name, _Pick())
    entry = next((one for one in (*pick.ranking, *pick.rejected) if one.custom_id == name), None)
    if entry is None:
        return Verdict(False, (NOT_SEEN,))
    values = entry.final_values or entry.values
    scores = {scorer: value for scorer, value in values.items() if value is not None}
    if name in pick.missing:
        return Verdict(False, (NOT_JUDGED,), entry.rank, scores)
    if name in pick.picked:
        by_hand = ("chosen by a person",) if pick.chosen_by == "person" else ()
        return Verdict(True, by_hand, entry.rank, scores)
    reasons = tuple(entry.reasons) or (f"rank {entry.rank} of {len(pick.ranking)}",)
    return Verdict(False, reasons, entry.rank, scores)
