"""Candidates in a run's folder, or in a file of texts, and their scores."""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.past_run import past_jobs
from hyimg_cli.journal.picks import DRAFTS, SCORES, ScoreKey, ScoresFile, read_lines
from hyimg_cli.scoring.ask import Asker, Questions
from hyimg_cli.scoring.process import Score, ScorerProcess, kept_replies, read_score
from hyimg_cli.scoring.scorers import Scorer
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.spec.job import TEXT_TASKS, VIDEO_TASKS
from hyimg_cli.spec.printed import printable
from hyimg_cli.spec.units import counted, time_text

BATCH = 8
_TOLD_EVERY_S = 30.0
_MOST_FAULTS = 5
Tell = Callable[[str], object]
Groups = dict[str, list[Candidate]]
T = TypeVar("T")


def read_candidates(place: Path) -> Groups:
    """Return candidates by line, in order, from a run's folder or a file of texts.

    A run's candidates are the ones with a result. Raises UsageError if the path is neither.
    """
    if place.is_file():
        found = [Candidate(line, {}, place.parent) for line in read_lines(place)]
        if not all({"custom_id", "prompt", "cot_text"} <= one.line.keys() for one in found):
            what, hint = "a line has no text", "name a file that hyimg think wrote"
            raise UsageError(what, where=place, hint=hint, code="usage.no-texts")
    else:
        if not RunFolder(place).is_run:
            hint = "name the -o of hyimg generate, or a file that hyimg think wrote"
            raise UsageError("this is not the output folder of a run", where=place, hint=hint)
        jobs = (
            one
            for one in past_jobs(place)
            if one.line and one.result and one.line.get("task") not in TEXT_TASKS
        )
        found = [Candidate(one.line, one.result, place) for one in jobs]
    if films := [one.custom_id for one in found if one.line.get("task") in VIDEO_TASKS]:
        what = f'"{films[0]}" is a video, but scorers accept only pictures'
        raise UsageError(what, where=place, hint="remove the videos", code="usage.videos")
    groups: Groups = defaultdict(list)
    for one in sorted(found, key=lambda one: one.number):
        groups[one.of].append(one)
    order = dict.fromkeys(one.of for one in found)
    return {of: groups[of] for of in order}


def read_pool(place: Path) -> tuple[Groups, dict[str, Candidate] | None]:
    """Return the candidates of a run; if they are drafts, also the full pictures by id.

    Raises UsageError for the drafts of a run: their scores and choices are in the run's folder.
    """
    if (run := run_of_drafts(place)) is not None:
        what = "these are the drafts of a run: its scores and choices are in the run's own folder"
        raise UsageError(what, where=place, hint=f"name the run: {run}", code="usage.drafts")
    if not (place / DRAFTS).is_dir():
        return read_candidates(place), None
    finals = read_candidates(place) if RunFolder(place).is_run else {}
    return read_candidates(place / DRAFTS), {one.custom_id: one for one in all_in(finals)}


def run_of_drafts(place: Path) -> Path | None:
    """Return the folder of the run that `place` holds the drafts of; None for other folders."""
    whole = place.absolute().resolve()
    if whole.name != DRAFTS or not RunFolder(place).is_run:
        return None
    if not any(line.get("draft_of") for line in RunFolder(place).results().values()):
        return None
    return place.parent if place.name == DRAFTS else Path(os.path.relpath(whole.parent))


def all_in(pool: Mapping[str, Sequence[T]]) -> list[T]:
    """Return the candidates of every line."""
    return [one for some in pool.values() for one in some]


def score_candidates(
    candidates: Sequence[Candidate],
    scorers: Sequence[Scorer],
    file: ScoresFile,
    config: CandidatesConfig,
    tell: Tell,
    *,
    retry_failed: bool = False,
    questions: Questions | None = None,
) -> int:
    """Ask each scorer for the scores that `file` lacks, and return how many were missing.

    A score is on disk as soon as it is known. A scorer with nothing to do is not started.
    `config.repeat`: how often each candidate is scored, by scorers whose scores can differ.
    `questions`: asks the model that drew; its scorers come first, and it is released after them.
    `retry_failed`: ask for missing values again. A scorer that cannot continue does not stop the
    others; MachineError is raised afterwards.
    """
    asked, errors = 0, list[MachineError]()
    for scorer in scorers:
        _record_kept(scorer, file, config.score_timeout, tell)
    known = {k for k, line in file.scores.items() if not retry_failed or line.get("fault") is None}
    for scorer in sorted(scorers, key=lambda one: not one.asks):
        if questions is not None and not scorer.asks:
            questions.close()
        # Equal texts, and equal pictures, are scored once.
        shown: dict[str, Candidate] = {}
        for one in candidates:
            if one.has.issuperset(scorer.declared["needs"]):
                shown.setdefault(one.key(scorer.identity, scorer.declared["needs"]), one)
        if (file.declared.get(scorer.name) or {}).get("identity") != scorer.identity:
            file.append([scorer.recorded])
        if config.repeat > 1 and scorer.is_computed:
            tell(f"{scorer.name}: asked once, because its score is the same each time")
        # Every candidate has its first score before any has its second.
        repeats = range(1 if scorer.is_computed else config.repeat)
        wanted = [ScoreKey(first, repeat) for repeat in repeats for first in shown]
        left = [key for key in wanted if key.own not in known]
        changed = {first for first in {key.first for key in left} if not shown[first].is_intact}
        if changed:
            tell(f"{counted(len(changed), 'candidate')} not scored: the file changed since its run")
        items = {key: shown[key.first] for key in left if key.first not in changed}
        try:
            if items:
                asked += _ask(scorer, items, file, config.score_timeout, tell, questions)
        except MachineError as error:
            errors.append(error)
        found = [file.scores[key.own] for key in wanted if key.own in file.scores]
        _tell_missing(scorer, candidates, found, tell)
        _tell_changes(scorer, found, tell)
    if errors:
        raise errors[0]
    return asked


def _tell_missing(
    scorer: Scorer,
    candidates: Sequence[Candidate],
    scores: Sequence[Mapping[str, Any]],
    tell: Tell,
) -> None:
    """Report why candidates have no value by a scorer: what they lack, and the scorer's reasons."""
    lacking = Counter(need for one in candidates for need in {*scorer.declared["needs"]} - one.has)
    for need, count in lacking.items():
        tell(f"{scorer.name}: {counted(count, 'candidate')} skipped: no {need} to show to it")
    unit = "score" if any("repeat" in one for one in scores) else "candidate"
    faults = Counter(str(one["fault"]) for one in scores if one.get("fault") is not None)
    for fault, count in faults.most_common(_MOST_FAULTS):
        tell(f"{scorer.name}: {counted(count, unit)} without a value: {printable(fault)}")
    if (others := len(faults) - _MOST_FAULTS) > 0:
        tell(f"{scorer.name}: {counted(others, 'more reason')} in {SCORES}")


def _tell_changes(scorer: Scorer, scores: Sequence[Mapping[str, Any]], tell: Tell) -> None:
    """Warn of facts about a scorer that are not the same for all its values."""
    for fact, counts in facts_in(scores).items():
        if len(counts) > 1:
            said = ", ".join(f"{printable(str(v))} ({n})" for v, n in counts.most_common())
            tell(f"warning: {scorer.name}: {fact} is not the same for all scores: {said}")


def facts_in(scores: Iterable[Mapping[str, Any]]) -> dict[str, Counter[Any]]:
    """Return how many values were given under each fact about their scorer, by its name."""
    found: dict[str, Counter[Any]] = defaultdict(Counter)
    for one in scores:
        if one.get("value") is not None:
            for fact, told in (one.get("facts") or {}).items():
                found[fact][told] += 1
    return dict(found)


def _record_kept(scorer: Scorer, file: ScoresFile, limit_s: float, tell: Tell) -> None:
    """Record what a scorer was asked for by a run that was killed."""
    count = 0
    for head, answer in kept_replies(file.replies_of(scorer.name), limit_s, tell):
        before = file.scores.get(str(head.get("key"))) or {}
        if before.get("value") is None:
            file.append([_line(head, read_score(answer, scorer.declared["range"]))])
            count += 1
    if count:
        tell(f"{scorer.name}: {counted(count, 'score')} recorded that an earlier run asked for")


def _line(head: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """Return the line of a score; without facts if there are none."""
    line = {**head, **asdict(score)}
    return line if score.facts else {name: v for name, v in line.items() if name != "facts"}


def _ask(
    scorer: Scorer,
    items: Mapping[ScoreKey, Candidate],
    file: ScoresFile,
    limit_s: float,
    tell: Tell,
    questions: Questions | None,
) -> int:
    """Score candidates by the keys of their scores."""
    began = told = time.monotonic()
    done, own = 0, {"scorer": scorer.name, "identity": scorer.identity}
    heads = {
        key.own: key.recorded | own | {"pixel_sha256": one.content} for key, one in items.items()
    }
    cases = {key.own: one.case(scorer.declared["needs"]) for key, one in items.items()}
    replies = file.replies_of(scorer.name)
    if scorer.asks:
        assert questions is not None, "a scorer that asks comes with a model"
        opened: Asker | ScorerProcess = questions.asker(scorer)
    else:
        opened = ScorerProcess(scorer, limit_s, tell, replies)
    with opened as process:
        for start in range(0, len(items), BATCH):
            batch = [*cases][start : start + BATCH]
            for scores in process.score({key: cases[key] for key in batch}, heads):
                file.append(_line(heads[key], score) for key, score in scores.items())
                done += len(scores)
            if time.monotonic() - told > _TOLD_EVERY_S:
                told = time.monotonic()
                tell(f"{scorer.name}: {done} of {len(items)} scored")
    replies.unlink(missing_ok=True)  # all of them are recorded
    took = time_text(time.monotonic() - began)
    unit = "score" if any(key.repeat for key in items) else "candidate"
    tell(f"{scorer.name}: {counted(done, unit)} asked in {took}")
    return done
