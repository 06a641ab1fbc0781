"""The columns of a dataset, the pictures in them, and the digest of a row.

A column's kind is `string`, `int64`, `float64`, `bool` or `image`, `[kind]` for a list of these, or
a mapping of names to kinds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyimg_cli.errors import StorageError
from hyimg_cli.files import bytes_of
from hyimg_cli.media.source_files import MAX_SOURCE_BYTES
from hyimg_cli.spec import digest

Kind = str | list[str] | dict[str, str]
Columns = dict[str, Any]
DEFAULT, PREFERENCE, ANSWERS = "default", "preference", "answers"
# Folders of the configurations that the Hub shows.
FOLDERS = {DEFAULT: "data", PREFERENCE: "preference", ANSWERS: "answers"}
ROW_SHA256 = "row_sha256"
# The first and the last columns of every configuration.
_ASKED: dict[str, Kind] = {
    "id": "string",
    "candidate_of": "string",
    "task": "string",
    "source": ["image"],
    "instruction": "string",
}
_MADE_BY: dict[str, Kind] = {
    "model": "string",
    "licences": {"model": "string", "sources": "string"},
    "record": "string",
    ROW_SHA256: "string",
}


@dataclass(frozen=True)
class Picture:
    """A picture in a row: its file name's suffix without the dot, and its file or bytes."""

    suffix: str
    sha256: str
    nbytes: int
    _source: Path | bytes = field(repr=False)

    @classmethod
    def of(cls, source: Path | bytes, suffix: str) -> "Picture":
        """Read a file once for its digest. Raises OSError."""
        data = source if isinstance(source, bytes) else bytes_of(source, MAX_SOURCE_BYTES)
        return cls(suffix, digest.of_bytes(data), len(data), source)

    @property
    def data(self) -> bytes:
        """Return the bytes, which must match the digest. Raises OSError, StorageError."""
        if isinstance(self._source, bytes):
            return self._source
        data = bytes_of(self._source, MAX_SOURCE_BYTES)
        if digest.of_bytes(data) != self.sha256:
            what, hint = "the file was changed during the export", "run the same command again"
            raise StorageError(what, where=self._source, hint=hint, code="export.changed")
        return data


def columns_of(config: str, rows: Sequence[Columns]) -> dict[str, Kind]:
    """Return the kind of each column, by name; `rows`: all of the dataset, of any configuration.

    Scores and layers have a column only if a row has some.
    """
    if config == ANSWERS:
        return _columns_of_answers()
    scorers = {name for row in rows for name in row.get("scores", ())}
    has_layers = any("layers" in row for row in rows)
    values = dict.fromkeys(sorted(scorers), "float64")
    scores: dict[str, Kind] = {"scores": values} if values else {}
    if config == DEFAULT:
        pictures: dict[str, Kind] = {"result": "image", "mask": "image"}
        pictures |= {"layers": ["image"]} if has_layers else {}
    else:
        pictures = {"chosen": "image", "rejected": "image", "chosen_id": "string"}
        scores |= {"chosen_scores": values} if values else {}
    return {
        **_ASKED,
        **pictures,
        "text": "string",
        **scores,
        "accepted": "bool",
        "reasons": ["string"],
        "rank": "int64",
        "source_sha256": ["string"],
        "pixel_sha256": "string",
        "model_sha256": "string",
        "seed": "int64",
        "steps": "int64",
        **_MADE_BY,
    }


def _columns_of_answers() -> dict[str, Kind]:
    return {
        **_ASKED,
        "text": "string",
        "answer": "string",
        "finish": "string",
        "choices": ["string"],
        "probabilities": ["float64"],
        "mass": "float64",
        "logprob": "float64",
        "tokens": "int64",
        "accepted": "bool",
        "reasons": ["string"],
        "source_sha256": ["string"],
        "model_sha256": "string",
        "seed": "int64",
        **_MADE_BY,
    }


def pictures_in(row: Columns) -> Iterator[tuple[str, str, Picture]]:
    """Yield a row's pictures, each with its name, such as `source0` or `result`, and its column."""
    for column, value in row.items():
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Picture):
                yield f"{column}{index}" if isinstance(value, list) else column, column, one


def row_digest(config: str, split: str, columns: Mapping[str, Any]) -> str:
    """Return the hex sha256 of a row: its configuration, its split and its columns.

    A picture counts by the sha256 of its bytes. Empty values, nulls and `row_sha256` do not count.
    """
    facts = {name: value for name, value in columns.items() if name != ROW_SHA256}
    return digest.of_json({"config": config, "split": split, "row": without_nulls(facts)})


def without_nulls(value: Any) -> Any:
    """Return a value without nulls and empty values; pictures become their sha256."""
    if isinstance(value, Mapping):
        kept = {name: without_nulls(one) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one not in (None, [], {}, "")}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return getattr(value, "sha256", value)


def as_utf8(value: Any) -> Any:
    """Return a value whose texts have no half surrogate pairs, which no dataset format can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {as_utf8(name): as_utf8(one) for name, one in value.items()}
    return [as_utf8(one) for one in value] if type(value) is list else value


def dataset_digest(rows: Iterable[str]) -> str:
    """Return the dataset hash: hex sha256 over the sorted digests of its rows, each on a line."""
    return digest.of_bytes("".join(f"{one}\n" for one in sorted(rows)).encode())
