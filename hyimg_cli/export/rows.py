"""Finished pictures and answers as rows of a dataset: splits, duplicates, pairs, digests."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hyimg_cli.errors import SourceImageError, UsageError
from hyimg_cli.export.columns import (
    ANSWERS,
    DEFAULT,
    PREFERENCE,
    ROW_SHA256,
    Columns,
    Picture,
    as_utf8,
    row_digest,
)
from hyimg_cli.export.finished import Entry, Finished
from hyimg_cli.export.licences import parts_of, public_part, source_licence
from hyimg_cli.journal.journal import files_of_edit, outputs_of
from hyimg_cli.journal.picks import kind_of
from hyimg_cli.manifest.resolved import public_fields
from hyimg_cli.media.images import size_of
from hyimg_cli.models.licences import AND
from hyimg_cli.spec import digest

_NAMES = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}
OTHER_SPLIT = "source in the other split"
# A picture rejected for these reasons is not known to be worse than the accepted one.
_NO_JUDGEMENT = ("not ", "duplicate of ", "failed", OTHER_SPLIT)
# What is told of a row that is not in the dataset.
_OF_REJECTED = ("id", "candidate_of", "reasons", "rank", "scores", "pixel_sha256")
# Answers with the same of these are duplicates.
_OF_QUESTION = ("task", "instruction", "source_sha256", "choices", "answer")
# Fields of a result line that a row's record keeps.
_KEPT = ("key", "warnings", "notes", "edit", "step_cache", "think_truncated", "cot_from")


@dataclass(frozen=True)
class Row:
    """A row to write."""

    config: str
    split: str
    columns: Columns

    @cached_property
    def sha256(self) -> str:
        return row_digest(self.config, self.split, self.columns)

    @property
    def written(self) -> Columns:
        return {**self.columns, ROW_SHA256: self.sha256}


@dataclass
class Planned:
    """The rows of a dataset, and the results without one.

    `rejected`: lines of rejected.jsonl, each with its reasons. `damaged`: missing or changed files,
    by their picture's id.
    """

    rows: list[Row] = field(default_factory=list)
    rejected: list[Entry] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportRequest:
    """The options of one export. `shards`: per split; None for shards of about 64 MB.

    `split`: shares such as `98/2` or `90/5/5`. Also: whether rejected pictures become preference
    pairs, the licence of sources whose lines have none, and whether sources are left out. `select`:
    texts of --select. Raises UsageError for invalid shares.
    """

    runs: Sequence[Path]
    folder: Path
    form: str
    split: str = "100"
    has_pairs: bool = False
    source_licence: str | None = None
    sources_by_hash: bool = False
    shards: int | None = None
    allowed_licences: tuple[str, ...] = ()
    force: bool = False
    select: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = self.split.split("/")
        if len(parts) not in _NAMES or not all(one.isdecimal() and int(one) for one in parts):
            what = f"--split {self.split} is not known"
            hint = "write 98/2, or 90/5/5 with validation"
            raise UsageError(what, hint=hint, code="usage.split")

    def split_of(self, sha256: str) -> str:
        """Return the split of a source or prompt, by its digest alone: adding rows moves none."""
        shares = [*map(int, self.split.split("/"))]
        place = int(sha256[:16], 16) % sum(shares)
        ends = (sum(shares[: n + 1]) for n in range(len(shares)))
        return next(n for n, end in zip(_NAMES[len(shares)], ends, strict=True) if place < end)


def plan_rows(
    finished: Iterable[Finished], licences: Mapping[str, str], request: ExportRequest
) -> Planned:
    """Return the rows of pictures and answers, in their order.

    Every file is read once for its digest.

    Raises UsageError if source pictures have no licence.
    """
    planned, seen, unlicensed = Planned(), dict[str, str](), list[str]()
    picture = cache(_picture)
    groups: dict[Any, tuple[list[Row], list[Row]]] = {}
    for one in finished:
        try:
            columns = _columns_of(one, picture, licences, request)
        except SourceImageError as error:
            planned.damaged[one.id] = f"{error.where}: {error.what}"
            continue
        except OSError as error:
            planned.damaged[one.id] = f"{error.filename}: {error.strerror}"
            continue
        if columns["source"] and not columns["licences"]["sources"]:
            unlicensed.append(one.id)
        sources, config = columns["source_sha256"], ANSWERS if one.is_answer else DEFAULT
        content = columns.get("pixel_sha256") or digest.of_json([columns[n] for n in _OF_QUESTION])
        splits = [*map(request.split_of, sources or [digest.of_json(columns["instruction"])])]
        if columns["accepted"]:
            if len({*splits}) > 1:
                columns |= {"accepted": False, "reasons": [OTHER_SPLIT]}
            elif content in seen:
                columns |= {"accepted": False, "reasons": [f"duplicate of {seen[content]}"]}
        row = Row(config, splits[0], columns)
        group = one.group, columns["instruction"], tuple(sources), config
        chosen, others = groups.setdefault(group, ([], []))
        if columns["accepted"]:
            seen[content] = one.id
            chosen.append(row)
            planned.rows.append(row)
        else:
            others.append(row)
            told = {name: columns[name] for name in _OF_REJECTED if name in columns}
            planned.rejected.append(told)
    if unlicensed:
        raise UsageError(
            f"the source pictures of {len(unlicensed)} rows have no licence, {unlicensed[0]} first",
            hint="name it with --source-licence, or in each line as "
            '"metadata": {"licence": "CC-BY-4.0"}; --sources by-hash leaves the sources out',
            code="export.source-licence",
        )
    if request.has_pairs:
        # No rule says which of several answers is the better one.
        pictures = [both for key, both in groups.items() if key[-1] == DEFAULT]
        planned.rows += [pair for both in pictures for pair in _pairs(*both)]
    return planned


def _columns_of(
    one: Finished, picture: Any, licences: Mapping[str, str], request: ExportRequest
) -> Columns:
    """Return the columns of a picture or an answer.

    Raises OSError or SourceImageError if one of its files is missing, changed, or not a picture.
    """
    line, result, (output, *others) = one.line, one.result, outputs_of(one.result)
    images = line.get("images") or ()
    known = [*(result.get("source_sha256") or ()), *[""] * len(images)]
    sources = [picture(Path(path), sha256) for path, sha256 in zip(images, known, strict=False)]
    record = {"job": public_fields(line)} | {n: result[n] for n in _KEPT if result.get(n)}
    file = picture(one.run.fetch(output["path"]), output["sha256"])
    columns: Columns = {
        "id": one.id,
        "candidate_of": result.get("candidate_of"),
        "task": line["task"],
        "source": [] if request.sources_by_hash else sources,
        "instruction": line["prompt"],
        "accepted": one.is_accepted,
        "reasons": list(one.reasons),
        "source_sha256": [source.sha256 for source in sources],
        "model_sha256": result.get("model_sha256", ""),
        "model": record["job"]["model"],
        "licences": {
            "model": AND.join(licences[public_part(part)] for part in parts_of(line)),
            "sources": source_licence(result, request.source_licence) if images else None,
        },
        "record": json.dumps(record, ensure_ascii=False, sort_keys=True),
    }
    if one.is_answer:
        return dict(as_utf8(columns | _facts_of_answer(line, result)))
    mask = files_of_edit(result).get("mask")
    layers = [picture(one.run.fetch(layer["path"]), layer["sha256"]) for layer in others]
    columns |= {
        "result": file,
        "mask": picture(one.run.fetch(mask["path"]), mask["sha256"]) if mask else None,
        **({"layers": layers} if layers else {}),
        "text": result.get("cot_text"),
        "scores": dict(one.scores),
        "rank": one.rank,
        "pixel_sha256": output["pixel_sha256"],
        "seed": output["seed"],
        "steps": result.get("denoise_steps"),
    }
    return dict(as_utf8(columns))


def _facts_of_answer(line: Entry, result: Entry) -> Columns:
    """Return the columns that only answers have."""
    choices, sure = result.get("choices") or {}, result.get("confidence") or {}
    return {
        "text": result.get("thought"),
        "answer": result["answer"],
        "finish": result.get("finish"),
        "choices": [*choices],
        "probabilities": [*map(float, choices.values())],
        "mass": result.get("mass"),
        "logprob": sure.get("logprob"),
        "tokens": sure.get("tokens"),
        "seed": line.get("ar_seed"),
    }


def _pairs(chosen: Sequence[Row], others: Sequence[Row]) -> Iterator[Row]:
    """Yield a line's preference pairs: the best accepted picture with each one judged worse."""
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
            columns.pop("layers", None)
            yield Row(PREFERENCE, best.split, columns)


def _picture(path: Path, sha256: str) -> Picture:
    """Return a file that has this digest or, if that is empty, is a picture.

    Raises OSError, SourceImageError.
    """
    if not sha256:
        size_of(str(path))  # a line of an untrusted run may name any file of this machine
    suffix = path.suffix.lower().removeprefix(".")
    found = Picture.of(path, suffix if suffix.isascii() and suffix.isalnum() else "bin")
    if sha256 and found.sha256 != sha256:
        raise OSError(0, "not the file that the run read or wrote", str(path))
    return found


def count_reasons(rejected: Iterable[Entry]) -> Counter[str]:
    """Count the rejected pictures by kind of reason, without the values and names in it."""
    return Counter(kind_of(reason) for one in rejected for reason in one["reasons"])
