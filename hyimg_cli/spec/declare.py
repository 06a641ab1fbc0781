"""Declare a field of a dataclass as a setting; `settings.table` has what follows from it."""

from dataclasses import MISSING, field
from typing import Any

# Panels of the help.
RUN, MODEL, SAMPLING, VIDEO = "Run", "Model", "Sampling defaults", "Video (t2v, i2v)"
OUTSIDE = "Edits that keep their source outside"
# The default that the job's checkpoint says where nobody else does.
CHECKPOINT = object()


def option(default: Any, help: str, *marks: Any, **declared: Any) -> Any:
    """Return a field that is a setting. `marks` narrow its type; `declared` are the further fields
    of `settings.table.Declaration`.
    """
    is_unset = default in (CHECKPOINT, None)
    known = None if default is MISSING else default
    row = {"help": help, "default": known, "marks": marks, **declared}
    return field(default=None if is_unset else default, metadata={"setting": row})
