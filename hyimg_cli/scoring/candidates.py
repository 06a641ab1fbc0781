"""Candidates of a run's folder, or of a file of texts, and their scores."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli.errors import MachineError, UsageError
from hyimg_cli.journal.journal import RunFolder, files_of_edit
from hyimg_cli.journal.keys import source_digest
from hyimg_cli.journal.past_run import resolved_jobs
from hyimg_cli.journal.picks import ScoresFile, read_lines
from hyimg_cli.journal.resume import is_intact
from hyimg_cli.scoring.process import Score, ScorerProcess
from hyimg_cli.scoring.scorers import Scorer
from hyimg_cli.settings.run import CandidatesConfig
from hyimg_cli.spec import digest
from hyimg_cli.spec.job import VIDEO_TASKS
from hyimg_cli.spec.units import counted, time_text

BATCH = 8
_TOLD_EVERY_S = 30.0
Tell = Callable[[str], object]
Groups = dict[str, list["Candidate"]]


@dataclass(frozen=True)
class Candidate:
    """One of the results that a line asked for, drawn or of its text alone: the job as it was
    resolved, its result line (empty of a text), and the folder that their paths lead from.
    """

    line: Mapping[str, Any]
    result: Mapping[str, Any] = field(repr=False)
    folder: Path

    @property
    def custom_id(self) -> str:
        return str(self.line["custom_id"])

    @property
    def of(self) -> str:
        """Id of the line that it is a candidate of; its own where that asks for one result."""
        return str(self.line.get("candidate_of", self.custom_id))

    @property
    def number(self) -> int:
        return int(self.line.get("candidate", 0))

    @property
    def round(self) -> int:
        return int(self.line.get("round", 1))

    @property
    def output(self) -> Mapping[str, Any]:
        """The picture; empty of a failed job, and of a text."""
        outputs = self.result.get("outputs") or ()
        return outputs[0] if outputs and self.result.get("status") == "done" else {}

    @property
    def content(self) -> str:
        """A digest of its pixels, or of its text where nothing was drawn."""
        if self.result:
            return str(self.output.get("pixel_sha256", ""))
        return digest.of_bytes(str(self.line.get("cot_text", "")).encode())

    @property
    def has(self) -> set[str]:
        """What a scorer can be shown of it, by the words of `scorers.NEEDS`."""
        matte = files_of_edit(self.result).get("mask")
        parts: dict[str, object] = {"result": self.output, "source": self._sources}
        parts |= {"text": self._text, "mask": matte}
        return {"prompt", *(name for name, part in parts.items() if part)}

    @property
    def is_intact(self) -> bool:
        """True if its picture is as its run wrote it."""
        return not self.result or is_intact(RunFolder(self.folder), self.result)

    @property
    def _text(self) -> str:
        return str((self.result or self.line).get("cot_text") or "")

    @property
    def _sources(self) -> list[str]:
        folder = self.folder.absolute()
        return [os.path.join(folder, path) for path in self.line.get("images", ())]

    def key(self, identity: str, needs: Iterable[str]) -> str:
        """The key of its score by the scorer of this identity: a digest of all that it is shown."""
        sources = self.result.get("source_sha256") or [*map(source_digest, self._sources)]
        facts = [identity, self.content, [*sources], self.line["prompt"]]
        facts += [self.line.get("kept_source", 1)] if "source" in needs else []
        facts += [self._text] if "text" in needs else []
        facts += [files_of_edit(self.result).get("mask")] if "mask" in needs else []
        return digest.of_json(facts)

    def case(self, needs: Iterable[str]) -> dict[str, Any]:
        """What a scorer of these needs is shown: paths are absolute."""
        folder = self.folder.absolute()
        path, matte = self.output.get("path"), files_of_edit(self.result).get("mask")
        return {
            "id": self.custom_id,
            "prompt": self.line["prompt"],
            "sources": self._sources,
            "kept_source": self.line.get("kept_source", 1),
            "result": path and str(folder / path),
            "mask": str(folder / matte["path"]) if matte and "mask" in needs else None,
            "text": self._text if "text" in needs else None,
        }


def read_candidates(place: Path) -> Groups:
    """The candidates of a run's folder that have a result, or the lines of a file of texts, by the
    line that asked for them, in order. Raises UsageError where there is neither.
    """
    if place.is_file():
        found = [Candidate(line, {}, place.parent) for line in read_lines(place)]
        if not all({"custom_id", "prompt", "cot_text"} <= one.line.keys() for one in found):
            what, hint = "a line has no text", "name a file that hyimg think wrote"
            raise UsageError(what, where=place, hint=hint, code="usage.no-texts")
    else:
        if not RunFolder(place).is_run:
            hint = "name the -o of hyimg generate, or a file that hyimg think wrote"
            raise UsageError("this is not the folder of a run", where=place, hint=hint)
        results = RunFolder(place).results()
        lines = dict(resolved_jobs(place))
        found = [Candidate(lines[i], results[i], place) for i in lines if i in results]
    if films := [one.custom_id for one in found if one.line.get("task") in VIDEO_TASKS]:
        what = f'"{films[0]}" is a video, and scorers are shown pictures'
        raise UsageError(what, where=place, hint="leave videos out", code="usage.videos")
    groups: Groups = defaultdict(list)
    for one in sorted(found, key=lambda one: one.number):
        groups[one.of].append(one)
    order = dict.fromkeys(one.of for one in found)
    return {of: groups[of] for of in order}


def score_candidates(
    candidates: Sequence[Candidate],
    scorers: Sequence[Scorer],
    file: ScoresFile,
    config: CandidatesConfig,
    tell: Tell,
    *,
    retry_failed: bool = False,
) -> int:
    """Ask each scorer for the scores that `file` lacks, and return how many those were.

    A batch's scores are on disk before the next one is asked. A scorer with nothing to do is not
    started. `retry_failed`: what has no value is asked again. One scorer's end leaves the others at
    work; then MachineError is raised.
    """
    asked, errors = 0, list[MachineError]()
    for scorer in scorers:
        needs = scorer.declaration.needs
        able = [one for one in candidates if one.has.issuperset(needs)]
        # Equal texts, and equal pictures, are asked once.
        wanted = {one.key(scorer.identity, needs): one for one in reversed(able)}
        known = {
            key
            for key, line in file.scores.items()
            if line.get("fault") is None or not retry_failed
        }
        left = {key: wanted[key] for key in reversed(wanted) if key not in known}
        if (file.declared.get(scorer.name) or {}).get("identity") != scorer.identity:
            file.append([scorer.recorded])
        try:
            asked += _ask(scorer, left, file, config, tell)
        except MachineError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return asked


def _ask(
    scorer: Scorer,
    left: Mapping[str, Candidate],
    file: ScoresFile,
    config: CandidatesConfig,
    tell: Tell,
) -> int:
    if not left:
        return 0
    began = told = time.monotonic()
    needs = scorer.declaration.needs
    items = [(key, one) for key, one in left.items() if one.is_intact]
    if gone := len(left) - len(items):
        tell(f"{counted(gone, 'candidate')} not scored: the file is not as its run wrote it")
    done = without = 0
    with ScorerProcess(scorer, config.score_timeout, tell) as process:
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            scores = process.score([one.case(needs) for _, one in batch])
            lines = [_line(scorer, *of, score) for of, score in zip(batch, scores, strict=True)]
            file.append(lines)
            done, without = (
                done + len(lines),
                without + sum(one["fault"] is not None for one in lines),
            )
            if time.monotonic() - told > _TOLD_EVERY_S:
                told = time.monotonic()
                tell(f"{scorer.name}: {done} of {len(items)} scored")
    took = time_text(time.monotonic() - began)
    missing = f", {without} of them without a value" if without else ""
    tell(f"{scorer.name}: {counted(done, 'candidate')} scored{missing} in {took}")
    return done


def _line(scorer: Scorer, key: str, candidate: Candidate, score: Score) -> dict[str, Any]:
    return {
        "key": key,
        "scorer": scorer.name,
        "identity": scorer.identity,
        "pixel_sha256": candidate.content,
        "value": score.value,
        "parts": dict(score.parts),
        "reason": score.reason,
        "fault": score.fault,
        "seconds": score.seconds,
    }
