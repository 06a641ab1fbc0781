"""Records in the state folder, as JSON files: read whole, or skipped by name.

One damaged or foreign file must not keep a server from starting. Times in records are those of the
wall clock; a running server waits for them on a clock that cannot be set.
"""

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from hyimg_cli.files import bytes_of, json_of, remove

logger = logging.getLogger(__name__)
# What a kill leaves of a file or folder that was being written.
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.tmp")
_STATUSES = "validating|in_progress|finalizing|completed|failed|expired|cancelling|cancelled"
_Time = Annotated[int, Field(ge=0, le=10**11)]
_BatchId = Annotated[str, Field(pattern=r"^batch_[0-9a-f]{24}$")]


class _Record(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    owner: str
    came: float
    created_at: _Time


class FileRecord(_Record):
    """A file: an upload has content, the output of a batch names its batch."""

    id: Annotated[str, Field(pattern=r"^file-[0-9a-f]{24}(-output|-error)?$")]
    purpose: str
    filename: str
    bytes: Annotated[int, Field(ge=0)]
    expires_at: _Time | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    batch: _BatchId | None = None
    kind: Literal["output", "error"] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "FileRecord":
        if self.sha256 is None and None in (self.batch, self.kind):
            raise ValueError("neither an upload nor a file of a batch")
        return self


class BatchRecord(_Record):
    """A batch."""

    id: _BatchId
    status: Annotated[str, Field(pattern=f"^({_STATUSES})$")]
    endpoint: str
    asked: str
    base_url: str
    expires_at: _Time
    request_counts: dict[Literal["total", "completed", "failed"], int]
    keep_s: int | None


def entries(folder: Path) -> Iterator[Path]:
    """Yield what a folder of records has; remove what kills left, and skip hidden files."""
    for path in sorted(folder.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            try:
                remove(path)
            except OSError as error:
                logger.warning("cannot remove %s: %s", path, error.strerror)
        elif not path.name.startswith("."):
            yield path


def read_record(path: Path, name: str, kind: type[_Record], most: int) -> dict[str, Any] | None:
    """Return the record `name` in a file of at most `most` bytes; None, logged, if it is damaged.

    A file that is not a record counts as damaged.
    """
    try:
        record: dict[str, Any] = json_of(bytes_of(path, most))
        kind.model_validate(record)
        if record["id"] != name:
            raise ValueError(f"it has the id {record['id']}")
        return record
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        why = ": ".join((*map(str, fault["loc"][:1]), fault["msg"]))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    logger.warning("skipped %s: %s", path, why)
    return None


def due_at(expires_at: float) -> float:
    """Return when a time of the wall clock comes, as `time.monotonic` counts."""
    return time.monotonic() + expires_at - time.time()
