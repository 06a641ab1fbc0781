"""Errors for values that cannot be read."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class BadValue(ValueError):
    """A value that its kind does not allow; the code of the fault ends in `slug`."""

    def __init__(self, what: str, hint: str, slug: str = "bad-value") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.slug = slug


def shown(value: Any, width: int = 60) -> str:
    """Return `value` as JSON on one line of at most `width` characters, safe to print."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= width else text[: width - 1] + "…"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like `word`, or None if none is close."""
    return next(iter(difflib.get_close_matches(word.lower(), list(known), 1, cutoff)), None)
