"""Make untrusted texts (names, prompts, contents of files) safe for a terminal or a log."""

import json
import logging
import traceback
from typing import Any


def printable(text: str, encoding: str = "utf-8") -> str:
    """`text` on one line; what would steer a terminal, turn writing around or is not in `encoding`
    is written as JSON escapes it. In a JSON text it changes no value.
    """
    if text.isascii() and text.isprintable():
        return text
    # Half of a surrogate pair, and what the encoding lacks, leave no byte.
    return "".join(
        c if c.isprintable() and c.encode(encoding, "ignore") else json.dumps(c)[1:-1] for c in text
    )


def indented(text: str) -> str:
    """The same of a text of several lines, which stand behind the first one's margin."""
    return "\n    ".join(map(printable, text.splitlines()))


def log_printable() -> None:
    """Have every log record of this process say what it says so, whoever writes it."""
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def __init__(self, *facts: Any, **more: Any) -> None:
        super().__init__(*facts, **more)
        if self.exc_info and self.exc_info[1]:
            self.exc_text = indented("".join(traceback.format_exception(self.exc_info[1])))

    def getMessage(self) -> str:
        return indented(super().getMessage())
