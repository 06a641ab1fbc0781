"""A scored run: what it was asked to draw, and each sample's scores, or why it has none."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyimg_cli.errors import UsageError
from hyimg_cli.journal.candidates import Candidate
from hyimg_cli.journal.keys import file_digest
from hyimg_cli.journal.past_run import past_jobs
from hyimg_cli.journal.picks import ScoresFile
from hyimg_cli.measure.scores.intervals import Samples
from hyimg_cli.scoring.candidates import facts_in
from hyimg_cli.settings.values import nearest, shown
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import VIDEO_TASKS

CODE = "eval.scores"
# Kinds of missing samples, by how their reasons begin; any other fault is the scorer's.
_KINDS = {"refused": "refused", "reply not readable": "unreadable", "failed": "failed"}
_KINDS |= {"not drawn": "missing", "not scored": "missing", "changed": "changed"}


@dataclass(frozen=True)
class Sample:
    """One result with its scores by repeat, None where there is none; `why`: the reasons.

    `picture`: a label that results share if they have the same source pictures; of a result
    without a source, its prompt. `asked`: a digest of its prompt and its sources. `path`: its file.
    """

    custom_id: str
    prompt: str
    picture: str
    asked: str
    values: tuple[float | None, ...]
    why: tuple[str, ...]
    path: Path | None

    @property
    def mean(self) -> float | None:
        given = [one for one in self.values if one is not None]
        return float(np.mean(given)) if given else None


@dataclass(frozen=True)
class ScoredRun:
    """A run's samples by id, as one scorer saw them, and how it declared itself.

    `facts`: how many values were given under each fact about the scorer. `repeats`: the highest
    number of scores of a sample.
    """

    place: Path
    scorer: str
    identity: str
    declared: Mapping[str, Any]
    samples: Mapping[str, Sample]
    facts: Mapping[str, Counter[Any]] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        return max((len(one.values) for one in self.samples.values()), default=1)

    @property
    def list_sha256(self) -> str:
        """A digest of what was asked for; the same in any folder and order."""
        return digest.of_json(sorted((one.custom_id, one.asked) for one in self.samples.values()))

    @property
    def incomplete(self) -> dict[str, tuple[str, ...]]:
        """The reasons of samples with fewer scores than the others, by id."""
        return {
            name: one.why or (f"not scored: {len(one.values)} of {self.repeats} times",)
            for name, one in self.samples.items()
            if one.why or len(one.values) < self.repeats
        }

    @property
    def worst(self) -> float:
        """The value that a missing score may at worst have: the end of the scorer's range, or the
        worst that it gave.
        """
        bounds, better = self.declared.get("range"), self.declared.get("higher_is_better", True)
        given = [v for one in self.samples.values() for v in one.values if v is not None]
        low, high = bounds or (min(given, default=0.0), max(given, default=0.0))
        return float(low if better else high)

    def table(self, names: Sequence[str], groups: Sequence[str] | None = None) -> Samples:
        """Return the scores of these samples, in order."""
        values = np.full((len(names), self.repeats), np.nan)
        for row, name in enumerate(names):
            for place, value in enumerate(self.samples[name].values):
                values[row, place] = np.nan if value is None else value
        return Samples(values, [self.samples[name].picture for name in names], groups)


def kind_of_missing(why: str) -> str:
    return next((kind for start, kind in _KINDS.items() if why.startswith(start)), "no value")


def scorers_in(place: Path) -> list[str]:
    """Return the names of the scorers that scored a run. Raises UsageError if none did."""
    if not (names := [*ScoresFile(place).declared]):
        hint = f"score it first: hyimg score {place} --score …"
        raise UsageError("this run has no scores", where=place, hint=hint, code=CODE)
    return names


def read_scored_run(place: Path, name: str) -> ScoredRun:
    """Return a run with its scores by a scorer, or by SCORER.PART, without writing anything.

    A picture that changed since its run has no score. Raises UsageError for a scorer that the run
    does not have, and OutputFolderError for damaged files.
    """
    file, known = ScoresFile(place), scorers_in(place)
    scorer, _, part = name.partition(".")
    if scorer not in known:
        close = nearest(scorer, known)
        hint = f"did you mean {close}?" if close else f"scorers here: {', '.join(known)}"
        what = f"no scorer is called {shown(scorer)}"
        raise UsageError(what, where=place, hint=hint, code=CODE)
    declared, identity = file.declared[scorer]["declared"], file.declared[scorer]["identity"]
    samples, lines = dict[str, Sample](), list[Mapping[str, Any]]()
    for job in past_jobs(place):
        if not job.line:
            continue
        if job.line.get("task") in VIDEO_TASKS:
            what = f'"{job.custom_id}" is a video, but scorers accept only pictures'
            raise UsageError(what, where=place, hint="compare pictures", code="usage.videos")
        one = Candidate(job.line, job.result, place)
        found = _scores_of(one, declared, identity, file)
        lines += found.values()
        if part:
            found = {n: {**line, "value": _part_of(line, part)} for n, line in found.items()}
        samples[job.custom_id] = _sample(one, found, _why_not(one, declared))
    if part and all(one.mean is None for one in samples.values()):
        what, hint = f"{scorer} has no part {shown(part)}", "parts are in scores.jsonl"
        raise UsageError(what, where=place, hint=hint, code=CODE)
    return ScoredRun(place, name, identity, declared, samples, facts_in(lines))


def _part_of(line: Mapping[str, Any], part: str) -> float | None:
    return None if line.get("value") is None else line["parts"].get(part)


def _why_not(one: Candidate, declared: Mapping[str, Any]) -> str:
    """Return why a result cannot have a score; empty if it can."""
    if not one.result:
        return "not drawn"
    if not one.is_done:
        return f"failed: {(one.result.get('error') or {}).get('message', '')}"
    if not one.is_intact:
        return "changed: the file is not as its run wrote it"
    lacking = [need for need in declared.get("needs", ()) if need not in one.has]
    return f"not scored: no {lacking[0]} to show" if lacking else ""


def _scores_of(
    one: Candidate, declared: Mapping[str, Any], identity: str, file: ScoresFile
) -> dict[int, Mapping[str, Any]]:
    needs = declared.get("needs", ())
    if not one.is_done or not one.has.issuperset(needs):
        return {}
    return dict(file.repeats(one.key(identity, needs)))


def _sample(one: Candidate, found: Mapping[int, Mapping[str, Any]], why_not: str) -> Sample:
    sources = [*map(str, one.result.get("source_sha256") or map(_digest, _paths(one)))]
    asked = digest.of_json([one.line["prompt"], sources])
    picture = digest.of_json(sources) if sources else asked
    # A repeat that was never asked, between two that were, has no line.
    count = max(found, default=-1) + 1
    lines = [found.get(repeat, {"fault": "not scored"}) for repeat in range(count)]
    why = [
        str(line.get("fault") or "not scored: no such part")
        for line in lines
        if line.get("value") is None
    ]
    values = [None if why_not else line.get("value") for line in lines]
    reasons = [why_not] if why_not else why if found else ["not scored"]
    path = one.output.get("path")
    where = one.folder / path if path else None
    return Sample(
        custom_id=one.custom_id,
        prompt=str(one.line["prompt"]),
        picture=picture,
        asked=asked,
        values=tuple(values),
        why=tuple(dict.fromkeys(reasons)),
        path=where,
    )


def _paths(one: Candidate) -> list[str]:
    return [*map(str, one.case(())["sources"])]


def _digest(path: str) -> str:
    return str(file_digest(path))
