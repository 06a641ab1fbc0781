"""Scores, picks and a person's choices in a run's folder, as files of JSON lines.

    OUT/scores.jsonl    appended; a scorer's declaration before its first score, then a line for
                        each score; the last line of a key or of a scorer's name counts. A score
                        that was repeated has the key of the `first` and its number, `repeat`
    OUT/choices.jsonl   appended; the last choice for a line of the manifest counts
    OUT/picks.jsonl     written whole, one line per line of the manifest
    OUT/candidates.jsonl  written whole as the run begins: every candidate, as a complete manifest
    OUT/drafts/         the run folder of the drafts

For a file of texts `texts.jsonl`, the first three are named `texts.scores.jsonl` and so on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from hyimg_cli.errors import OutputFolderError
from hyimg_cli.files import json_of, refuse_constant, replace_file
from hyimg_cli.journal.disk import disk_errors, take_lock
from hyimg_cli.journal.journal import bytes_if_any, json_line
from hyimg_cli.journal.journal_file import JournalFile, lines_in
from hyimg_cli.spec import digest

SCORES, PICKS, CHOICES = "scores.jsonl", "picks.jsonl", "choices.jsonl"
DRAFTS, CANDIDATES = "drafts", "candidates.jsonl"
Line = Mapping[str, Any]
# The end of a reason's kind: `judge.follows 5 < 7`, `duplicate of cat-3`, `global: structure …`.
_KIND = re.compile(r":| of | -?[0-9]")


def beside(place: Path, name: str) -> Path:
    """Return the path of such a file: in a run's folder, or next to a file of texts."""
    return place / name if place.is_dir() else place.with_name(f"{place.stem}.{name}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it does not exist.

    A last line that a kill cut off is skipped. Raises OutputFolderError for any other line that
    is not a JSON object.
    """
    with disk_errors(path):
        data = bytes_if_any(path)
    found: list[dict[str, Any]] = []
    for number, line in lines_in(data[: data.rfind(b"\n") + 1]):
        try:
            entry = json_of(line, parse_constant=refuse_constant)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            hint = f"remove the line, or remove {path.name} to have it written again"
            where = f"{path}:{number}"
            raise OutputFolderError(
                "this line is not a JSON object", where=where, hint=hint, code="output.damaged"
            )
        found.append(entry)
    return found


def read_picks(place: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of picks.jsonl by the manifest line's id; empty without that file."""
    entries = read_lines(beside(place, PICKS))
    return {one["candidate_of"]: one for one in entries if isinstance(one.get("candidate_of"), str)}


@dataclass(frozen=True)
class CandidateVerdict:
    """The verdict in picks.jsonl on a candidate of the line `of`.

    `state`: picked, ranked or rejected. `why`: its rank, or the reasons against it. `is_missing`:
    True if picked but not yet drawn in full. `final_values`: for a draft, the values of the
    picture drawn in full.
    """

    of: str
    state: str
    why: tuple[str, ...]
    rank: int | None
    values: dict[str, float | None]
    final_values: dict[str, float | None]
    is_by_person: bool
    is_missing: bool


def verdicts_of(picks: Mapping[str, Line], place: Path) -> dict[str, CandidateVerdict]:
    """Return the verdict on each candidate of `read_picks(place)`, by its id.

    Raises OutputFolderError for a damaged line.
    """
    found: dict[str, CandidateVerdict] = {}
    for of, line in picks.items():
        try:
            is_by_person = line.get("chosen_by") == "person"
            for entry in (*line["ranking"], *line["rejected"]):
                name, rank = entry["custom_id"], None
                state, why = "rejected", tuple(map(str, entry.get("reasons", ())))
                if "rank" in entry:
                    state, rank = "ranked", int(entry["rank"])
                    why = (f"rank {rank} of {len(line['ranking'])}", *entry.get("overruled", ()))
                if name in line["picked"]:
                    state = "picked"
                values, final_values = (
                    {n: None if v is None else float(v) for n, v in entry.get(kind, {}).items()}
                    for kind in ("values", "final_values")
                )
                is_missing = name in line.get("missing", ())
                found[name] = CandidateVerdict(
                    of, state, why, rank, values, final_values, is_by_person, is_missing
                )
        except (KeyError, TypeError, ValueError, AttributeError):
            what, hint = f'{PICKS} is damaged at "{of}"', "run hyimg pick to write it again"
            raise OutputFolderError(what, where=place, hint=hint, code="output.damaged") from None
    return found


def kind_of(reason: str) -> str:
    """Return a reason without its numbers and names, for counting."""
    return _KIND.split(reason.removeprefix("final: "))[0]


def write_picks(place: Path, picks: Iterable[Line]) -> None:
    """Replace picks.jsonl."""
    path = beside(place, PICKS)
    with disk_errors(path.parent):
        replace_file(path, b"".join(map(json_line, picks)))


def write_candidates(place: Path, lines: Iterable[Line]) -> None:
    """Replace candidates.jsonl, by which a run of candidates is known before anything is picked."""
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / CANDIDATES, b"".join(map(json_line, lines)))


def append_choices(place: Path, choices: Iterable[Line]) -> None:
    """Add a person's choices: lines with `candidate_of` and `picked`.

    `picked` is a list of ids, which is empty if no candidate is good, or null to follow the rule.
    """
    path = beside(place, CHOICES)
    with disk_errors(path.parent), closing(JournalFile(path)) as file:
        file.append([json_line(one) for one in choices])


def read_choices(place: Path) -> dict[str, list[str]]:
    """Return a person's last choice for each line of the manifest that has one."""
    last = {
        one.get("candidate_of"): one.get("picked") for one in read_lines(beside(place, CHOICES))
    }
    return {of: picked for of, picked in last.items() if of and isinstance(picked, list)}


def uncounted_choices(place: Path, picks: Mapping[str, Line]) -> set[str]:
    """Return the lines of the manifest with a choice that `read_picks(place)` does not show.

    For example, a file that the report page saved was copied into the run's folder.
    """
    choices, found = read_choices(place), set[str]()
    for of, names in choices.items():
        line = picks.get(of, {})
        entries = (*line.get("ranking", ()), *line.get("rejected", ()))
        known = {str(one.get("custom_id")) for one in entries}
        if line.get("chosen_by") != "person" or {*line["picked"]} != {*names} & known:
            found.add(of)
    by_person = {of for of, line in picks.items() if line.get("chosen_by") == "person"}
    return found | (by_person - choices.keys() if beside(place, CHOICES).exists() else set())


@dataclass(frozen=True)
class ScoreKey:
    """One of a candidate's scores by a scorer: the key of the `first`, and `repeat` from 0."""

    first: str
    repeat: int = 0

    @property
    def own(self) -> str:
        return digest.of_json([self.first, self.repeat]) if self.repeat else self.first

    @property
    def recorded(self) -> dict[str, Any]:
        """How the score's line begins."""
        of = {"first": self.first, "repeat": self.repeat} if self.repeat else {}
        return {"key": self.own} | of


def mean_score(scores: Sequence[Line]) -> Line:
    """Return a candidate's score by one scorer: of repeated scores, the mean of those with a value.

    `scores` is not empty.
    """
    given = [one for one in scores if one.get("value") is not None]
    if len(scores) == 1 or not given:
        return scores[0]
    names = [name for name in given[0]["parts"] if all(name in one["parts"] for one in given)]
    parts = {name: fmean(one["parts"][name] for one in given) for name in names}
    return {**given[0], "value": fmean(one["value"] for one in given), "parts": parts}


class ScoresFile:
    """scores.jsonl. Reading needs no lock; appending needs `with`, which takes a separate lock."""

    def __init__(self, place: Path) -> None:
        self._path = beside(place, SCORES)
        # The last line of each score by key, and each scorer's last declaration by name.
        self.scores: dict[str, Line] = {}
        self.declared: dict[str, Line] = {}
        self._repeats: dict[str, dict[int, Line]] = {}
        self._held = ExitStack()
        self._file: JournalFile | None = None
        self._take(read_lines(self._path))

    def __enter__(self) -> Self:
        with disk_errors(self._path), ExitStack() as held:
            take_lock(self._path.with_name(f".{self._path.name}.lock"), held)
            self._file = held.enter_context(closing(JournalFile(self._path)))
            self._held = held.pop_all()
        self._take(read_lines(self._path))
        return self

    def __exit__(self, *_: object) -> None:
        self._file = None
        self._held.close()

    def append(self, lines: Iterable[Line]) -> None:
        """Add lines; they are on disk when this returns."""
        assert self._file is not None, "the file is written with its lock"
        added = list(lines)
        with disk_errors(self._path):
            self._file.append([json_line(one) for one in added])
        self._take(added)

    def replies_of(self, scorer: str) -> Path:
        """Return the path of a file with replies that a scorer got, until they are recorded."""
        return self._path.with_name(f".{self._path.name}.{scorer}.replies")

    def repeats(self, first: str) -> dict[int, Line]:
        """Return a candidate's scores by one scorer, by repeat from 0; `first`: its first key."""
        own = {0: self.scores[first]} if first in self.scores else {}
        return own | dict(sorted(self._repeats.get(first, {}).items()))

    def means(self) -> dict[str, Line]:
        """Return one score for each candidate and scorer, by the key of the first of them."""
        own = {one["key"] for some in self._repeats.values() for one in some.values()}
        firsts = dict.fromkeys((*self.scores, *self._repeats))
        return {key: mean_score([*self.repeats(key).values()]) for key in firsts if key not in own}

    def join(self, other: "ScoresFile") -> None:
        """Add the scores of another folder that are missing here."""
        lines = [one for name, one in other.declared.items() if name not in self.declared]
        lines += [one for key, one in other.scores.items() if key not in self.scores]
        if lines:
            self.append(lines)

    def _take(self, lines: Iterable[Line]) -> None:
        for one in lines:
            if isinstance(one.get("key"), str):
                self.scores[one["key"]] = one
                if isinstance(one.get("first"), str) and type(one.get("repeat")) is int:
                    self._repeats.setdefault(one["first"], {})[one["repeat"]] = one
            elif isinstance(one.get("declared"), dict):
                self.declared[str(one.get("scorer"))] = one
