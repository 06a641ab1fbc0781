"""Measure whether drafts are worth it for a checkpoint and a scorer.

Compares the share of best-of-n's gain that is left after choosing by drafts with fewer full
candidates for the same denoise steps.

    gain     of best-of-n: a task's best value among n pictures in full, less their mean
    share    of that gain, over all tasks, that is left where drafts choose
    fewer    the same of the expected best of so many pictures in full as the steps would pay for

Intervals are of a bootstrap over tasks, 90 %. All of it is by this scorer: its own errors stay.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import comb
from typing import Any

import numpy as np

from hyimg_cli.engine.run import ManifestRun
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.journal.picks import ScoresFile
from hyimg_cli.report.page import render
from hyimg_cli.scoring.ask import Questions
from hyimg_cli.scoring.best_of import draft_of
from hyimg_cli.scoring.candidates import (
    Groups,
    all_in,
    read_candidates,
    score_candidates,
)
from hyimg_cli.scoring.scorers import Scorer, scorers_of
from hyimg_cli.spec.job import Job

_RESAMPLES, _TAILS = 4000, (5, 95)
_REDONE = (1, 2)


@dataclass(frozen=True)
class Task:
    """A line's candidates by one scorer; higher is better.

    `full` [n], and by draft steps `drafts` [n] with the same seeds. `steps`: denoise steps of a
    picture in full.
    """

    full: np.ndarray
    drafts: Mapping[int, np.ndarray]
    steps: int


def compare_drafts(
    request: RunRequest, counts: Sequence[int], tell: Callable[[str], object]
) -> dict[str, Any]:
    """Draw every candidate in full and in these draft steps, score them all, and compare.

    Every part resumes. The result is also in `drafts.json` in the request's folder. A scorer that
    has no two values in any line has no rows, but a `fault`. Raises UsageError if all are so.
    """
    folder, config = request.config.output.folder, request.config.candidates
    if not (scorers := scorers_of(config, request.config.model)):
        raise UsageError("no scorer given", hint="add one, for example --score outside")
    pools: dict[int, Groups] = {}
    for steps in (0, *counts):
        place = folder / (f"drafts-{steps}" if steps else "full")
        tell(f"{place.name}: drawing")
        output = replace(request.config.output, folder=place, report=False)
        change = partial(_drafts, steps) if steps else request.change
        own = replace(request, config=replace(request.config, output=output), change=change)
        ManifestRun(own).run(lambda _: None)
        pools[steps] = read_candidates(place)
    with ScoresFile(folder) as file, Questions(request.config) as questions:
        every = [one for pool in pools.values() for one in all_in(pool)]
        score_candidates(every, scorers, file, config, tell, questions=questions)
    found: dict[str, Any] = {}
    for scorer in scorers:
        scores = file.means()
        tasks = _tasks(pools, scorer, scores)
        rows = (
            []
            if not tasks
            else [judge_drafts(tasks, steps, redone) for steps in counts for redone in _REDONE]
        )
        left_out = len(pools[0]) - len(tasks)
        found[scorer.name] = {"tasks": len(tasks), "left_out": left_out, "rows": rows}
        if not tasks:  # the other scorers may have values
            found[scorer.name]["fault"] = _usual_fault(pools[0], scorer, scores)
    if not any(one["tasks"] for one in found.values()):
        faults = "; ".join(f"{name}: {one['fault']}" for name, one in found.items())
        raise UsageError(f"no line has two candidates with a value ({faults})")
    replace_file(folder / "drafts.json", (json.dumps({"scorers": found}, indent=2) + "\n").encode())
    return found


def _usual_fault(full: Groups, scorer: Scorer, scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the most frequent reason why a scorer gave no value."""
    keys = (one.key(scorer.identity, scorer.declared["needs"]) for one in all_in(full))
    faults = Counter(scores.get(key, {}).get("fault") or "" for key in keys)
    return max(filter(None, faults), key=faults.__getitem__, default="a line needs two candidates")


def _drafts(steps: int, jobs: Sequence[Job]) -> list[Job]:
    return [draft_of(job, steps) for job in jobs]


def _tasks(
    pools: Mapping[int, Groups], scorer: Scorer, scores: Mapping[str, Mapping[str, Any]]
) -> list[Task]:
    """Return lines whose candidates all have a full value; a draft without one is never chosen."""
    sign = 1 if scorer.declared["higher_is_better"] else -1

    def values(some: Sequence[Candidate]) -> dict[str, float]:
        keys = {one.custom_id: one.key(scorer.identity, scorer.declared["needs"]) for one in some}
        found = {name: scores.get(key, {}).get("value") for name, key in keys.items()}
        return {name: sign * float(one) for name, one in found.items() if one is not None}

    tasks = []
    for of, full in pools[0].items():
        known = {steps: values(pool.get(of, ())) for steps, pool in pools.items()}
        by_steps = {
            steps: np.array([own.get(one.custom_id, -np.inf) for one in full])
            for steps, own in known.items()
        }
        if len(full) > 1 and np.isfinite(by_steps[0]).all():
            tasks.append(Task(by_steps[0], by_steps, int(full[0].result["denoise_steps"])))
    return tasks


def judge_drafts(tasks: Sequence[Task], steps: int, redone: int) -> dict[str, Any]:
    """Compare drafts with the same steps spent on fewer full pictures.

    The best `redone` drafts are drawn in full, and the best of these is kept. Returns the share of
    best-of-n's gain for both, and their difference, each with its interval; and the verdict. Drafts
    are worth it if the difference's interval is above zero.
    """
    rows = []
    for task in tasks:
        full, order = task.full, np.argsort(-task.drafts[steps], kind="stable")
        spent = len(full) * steps + redone * task.steps
        best = full.max(), full[order[:redone]].max(), expected_best(full, spent / task.steps)
        rows.append((*(one - full.mean() for one in best), spent, order[0] == np.argmax(full)))
    sums = resampled_sums(rows)
    with np.errstate(all="ignore"):
        share, fewer = sums[1:3] / sums[0]
    difference = _interval(share - fewer)
    return {
        "draft_steps": steps,
        "redone": redone,
        "steps": round(sums[3, 0] / len(rows), 1),
        "steps_of_all_in_full": round(np.mean([len(one.full) * one.steps for one in tasks]), 1),
        "share": _interval(share),
        "fewer": _interval(fewer),
        "difference": difference,
        "same_winner": round(sums[4, 0] / len(rows), 3),
        "is_worth_it": bool((difference["low"] or 0) > 0),
    }


def resampled_sums(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return sums of each column of these rows, and of rows drawn from them with replacement.

    [column, 1 + resample].
    """
    table = np.array(rows, dtype=float)
    draws = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    return np.vstack([table.sum(0), table[draws].sum(1)]).T


def expected_best(values: np.ndarray, count: float) -> float:
    """Return the expected best of `count` of these values [n], drawn without replacement.

    Between whole counts, interpolates.
    """
    ordered, whole = np.sort(values), range(1, len(values) + 1)
    ways = [[comb(below, count - 1) for below in range(len(values))] for count in whole]
    best = [np.dot(ordered, own) / sum(own) for own in ways]
    return float(np.interp(count, whole, best))


def _interval(values: np.ndarray) -> dict[str, float | None]:
    """Return the value itself, which is first, and the interval of its resamples."""
    own, resampled = values[0], values[1:][np.isfinite(values[1:])]
    if not np.isfinite(own) or not len(resampled):
        return {"value": None, "low": None, "high": None}
    low, high = np.percentile(resampled, _TAILS)
    return {"value": round(own, 4), "low": round(low, 4), "high": round(high, 4)}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the comparison as tables."""
    return render("drafts.md", scorers=found)
