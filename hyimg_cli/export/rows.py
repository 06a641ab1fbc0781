"""Candidates as the rows of a dataset: splits, duplicates, preference pairs, digests."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hyimg_cli.errors import SourceImageError, StorageError, UsageError
from hyimg_cli.export.candidates import Candidate, Entry
from hyimg_cli.export.columns import (
    DEFAULT,
    PREFERENCE,
    ROW_SHA256,
    Columns,
    Picture,
    as_utf8,
    row_digest,
)
from hyimg_cli.export.licences import parts_of, public_part, source_licence
from hyimg_cli.files import bytes_of
from hyimg_cli.journal.journal import files_of_edit, outputs_of
from hyimg_cli.manifest.resolved import public_fields
from hyimg_cli.media.images import MAX_SOURCE_BYTES, size_of
from hyimg_cli.models.licences import AND
from hyimg_cli.spec import digest

_NAMES = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}
OTHER_SPLIT = "source in the other split"
# Rejected for these reasons a picture is not known to be worse than the accepted one.
_NO_JUDGEMENT = ("not ", "duplicate of ", "failed", OTHER_SPLIT)
# Ends the kind of a reason: `judge.follows 5 < 7`, `duplicate of cat-3`, `global: structure …`.
_KIND = re.compile(r":| of | -?[0-9]")
# Of a result line, what a row's record keeps.
_KEPT = ("key", "warnings", "notes", "edit", "step_cache", "think_truncated", "cot_from")


class PictureFile(NamedTuple):
    """A picture's file on this machine, by its digest and its bytes."""

    path: Path
    sha256: str
    nbytes: int

    @property
    def suffix(self) -> str:
        """The ending of its name without the dot, of letters and digits."""
        suffix = self.path.suffix.lower().removeprefix(".")
        return suffix if suffix.isascii() and suffix.isalnum() else "bin"

    def read(self) -> Picture:
        """Its bytes, which must be those of the digest. Raises StorageError."""
        found = Picture(bytes_of(self.path, MAX_SOURCE_BYTES), self.suffix)
        if found.sha256 != self.sha256:
            what, hint = "the file was changed during the export", "run the same command again"
            raise StorageError(what, where=self.path, hint=hint, code="export.changed")
        return found


@dataclass(frozen=True)
class Row:
    """A row to write: of `columns`, pictures are files."""

    config: str
    split: str
    columns: Mapping[str, Any]

    @cached_property
    def sha256(self) -> str:
        return row_digest(self.config, self.split, self.columns)

    @property
    def files(self) -> dict[str, list[PictureFile]]:
        """The pictures' files by column."""
        listed = {n: v if isinstance(v, list) else [v] for n, v in self.columns.items()}
        return {n: v for n, v in listed.items() if v and isinstance(v[0], PictureFile)}

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for files in self.files.values() for file in files)

    def read(self) -> Columns:
        """Its columns with the pictures' bytes. Raises OSError, StorageError."""
        read = {
            name: [file.read() for file in files]
            if isinstance(self.columns[name], list)
            else files[0].read()
            for name, files in self.files.items()
        }
        return {**self.columns, **read, ROW_SHA256: self.sha256}


class Splits:
    """Which split a source belongs to: by its digest, so that more rows move none."""

    def __init__(self, shares: str = "100") -> None:
        """`shares`: such as `98/2` or `90/5/5`. Raises UsageError."""
        parts = shares.split("/")
        if len(parts) not in _NAMES or not all(one.isdecimal() and int(one) for one in parts):
            what, hint = f"--split {shares} is not known", "write 98/2, or 90/5/5 with validation"
            raise UsageError(what, hint=hint, code="usage.split")
        self.names = _NAMES[len(parts)]
        self.shares = list(map(int, parts))

    def of(self, sha256: str) -> str:
        """The split of a digest."""
        place = int(sha256[:16], 16) % sum(self.shares)
        for name, share in zip(self.names, self.shares, strict=True):
            if place < share:
                return name
            place -= share
        raise AssertionError("shares add up")


@dataclass
class Planned:
    """The rows of a dataset, and what has none. `rejected`: lines of rejected.jsonl, each with its
    reasons; `damaged`: files that are gone or changed, by the id of their candidate.
    """

    rows: list[Row] = field(default_factory=list)
    rejected: list[Entry] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowOptions:
    """What rows hold: how they are split, whether rejected ones become preference pairs, the
    licence of sources whose lines name none, and whether sources are left out.
    """

    splits: Splits = field(default_factory=Splits)
    has_pairs: bool = False
    source_licence: str | None = None
    sources_by_hash: bool = False


def plan_rows(
    candidates: Iterable[Candidate], licences: Mapping[str, str], options: RowOptions
) -> Planned:
    """The rows of candidates, in their order; every file is read once for its digest.

    Raises UsageError where source pictures have no licence.
    """
    planned, files, seen = Planned(), _Files(), dict[str, str]()
    groups: dict[Any, tuple[list[Row], list[Row]]] = {}
    unlicensed = list[str]()
    for one in candidates:
        try:
            row = _row_of(one, files, licences, options)
        except (OSError, SourceImageError) as error:
            parts = (
                (error.filename, error.strerror)
                if isinstance(error, OSError)
                else (error.where, error.what)
            )
            planned.damaged[one.id] = ": ".join(map(str, parts))
            continue
        columns = row.columns
        if columns["source"] and not columns["licences"]["sources"]:
            unlicensed.append(one.id)
        reasons, pixels = as_utf8(list(one.verdict.reasons)), columns["pixel_sha256"]
        is_accepted = one.verdict.is_accepted
        if is_accepted and any(options.splits.of(s) != row.split for s in columns["source_sha256"]):
            is_accepted, reasons = False, [OTHER_SPLIT]
        if is_accepted and pixels in seen:
            is_accepted, reasons = False, [f"duplicate of {seen[pixels]}"]
        group = one.group, columns["instruction"], tuple(columns["source_sha256"])
        chosen, others = groups.setdefault(group, ([], []))
        row = Row(row.config, row.split, {**columns, "accepted": is_accepted, "reasons": reasons})
        if is_accepted:
            seen[pixels] = one.id
            chosen.append(row)
            planned.rows.append(row)
        else:
            others.append(row)
            told = ("id", "candidate_of", "reasons", "rank", "scores", "pixel_sha256")
            planned.rejected.append({name: row.columns.get(name) for name in told})
    if unlicensed:
        raise UsageError(
            f"the source pictures of {len(unlicensed)} rows have no licence, {unlicensed[0]} first",
            hint="name it with --source-licence, or in each line as "
            '"metadata": {"licence": "CC-BY-4.0"}; --sources by-hash leaves the sources out',
            code="export.source-licence",
        )
    if options.has_pairs:
        planned.rows += [pair for both in groups.values() for pair in _pairs(*both)]
    return planned


def _row_of(
    one: Candidate, files: "_Files", licences: Mapping[str, str], options: RowOptions
) -> Row:
    """The row of a candidate. Raises OSError or SourceImageError where one of its files is gone,
    changed, or not a picture.
    """
    line, result, output = one.line, one.result, outputs_of(one.result)[0]
    known = result.get("source_sha256") or ()
    images = list(map(Path, line.get("images") or ()))
    sources = [
        files.find(path, known[index] if index < len(known) else "")
        for index, path in enumerate(images)
    ]
    mask = files_of_edit(result).get("mask")
    job = public_fields(line)
    record = {"job": job} | {name: result[name] for name in _KEPT if result.get(name)}
    instruction = as_utf8(line["prompt"])
    source_digests = [file.sha256 for file in sources]
    split = options.splits.of([*source_digests, digest.of_json(instruction)][0])
    columns: Columns = {
        "id": one.id,
        "candidate_of": result.get("candidate_of"),
        "task": line["task"],
        "source": [] if options.sources_by_hash else sources,
        "instruction": instruction,
        "result": files.find(one.run.fetch(output["path"]), output["sha256"]),
        "mask": files.find(one.run.fetch(mask["path"]), mask["sha256"]) if mask else None,
        "text": result.get("cot_text"),
        "scores": dict(one.verdict.scores),
        "rank": one.verdict.rank,
        "source_sha256": source_digests,
        "pixel_sha256": output["pixel_sha256"],
        "model_sha256": one.model_sha256,
        "seed": output["seed"],
        "steps": result.get("denoise_steps"),
        "model": job["model"],
        "licences": {
            "model": AND.join(licences[public_part(part)] for part in parts_of(line)),
            "sources": source_licence(result, options.source_licence) if images else None,
        },
        "record": json.dumps(record, ensure_ascii=False, sort_keys=True),
    }
    return Row(DEFAULT, split, as_utf8(columns))


def _pairs(chosen: Sequence[Row], others: Sequence[Row]) -> Iterator[Row]:
    """Preference pairs of a line: the best accepted picture and each that was judged worse."""
    if not chosen:
        return
    best = min(chosen, key=lambda row: row.columns["rank"] or len(chosen) + len(others))
    for row in others:
        columns = dict(row.columns)
        is_judged = not any(reason.startswith(_NO_JUDGEMENT) for reason in columns["reasons"])
        if is_judged and columns["pixel_sha256"] != best.columns["pixel_sha256"]:
            columns |= {"chosen": best.columns["result"], "rejected": columns.pop("result")}
            columns |= {"chosen_id": best.columns["id"], "chosen_scores": best.columns["scores"]}
            del columns["mask"]
            yield Row(PREFERENCE, best.split, columns)


class _Files:
    """Digests of files, each read once."""

    def __init__(self) -> None:
        self._known: dict[Path, PictureFile] = {}

    def find(self, path: Path, sha256: str) -> PictureFile:
        """The file, which must have this digest, or be a picture where that is empty. Raises
        OSError, SourceImageError.
        """
        if path not in self._known:
            if not sha256:
                size_of(str(path))  # a line of a stranger's run may name any file of this machine
            data = bytes_of(path, MAX_SOURCE_BYTES)
            self._known[path] = PictureFile(path, digest.of_bytes(data), len(data))
        file = self._known[path]
        if sha256 and file.sha256 != sha256:
            raise OSError(0, "not the file that the run read or wrote", str(path))
        return file


def count_reasons(rejected: Iterable[Entry]) -> Counter[str]:
    """How many were rejected for each kind of reason, without the values and names in it."""
    return Counter(_KIND.split(reason)[0] for one in rejected for reason in one["reasons"])
