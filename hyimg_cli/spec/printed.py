"""Make untrusted texts (names, prompts, contents of files) safe for a terminal or a log."""

import json
import logging
import traceback
from typing import Any


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` on one line, safe to print.

    Characters that control the terminal, change the writing direction, or are not in `encoding`
    become JSON escapes. In a JSON text, this changes no value.
    """
    if text.isascii() and text.isprintable():
        return text
    # Half of a surrogate pair, and characters that the encoding lacks, leave no byte.
    return "".join(
        c if c.isprintable() and c.encode(encoding, "ignore") else json.dumps(c)[1:-1] for c in text
    )


def indented(text: str) -> str:
    """Return a text of several lines, safe to print; later lines are indented like the first."""
    return "\n    ".join(map(printable, text.splitlines()))


def log_printable() -> None:
    """Make every log record of this process printable, whichever library writes it."""
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def __init__(self, *facts: Any, **more: Any) -> None:
        super().__init__(*facts, **more)
        if self.exc_info and self.exc_info[1]:
            self.exc_text = indented("".join(traceback.format_exception(self.exc_info[1])))

    def getMessage(self) -> str:
        return indented(super().getMessage())
