"""What is wrong with a line that is not JSON, in words for people who wrote it by hand."""

import json
import re

_CURLY, _SINGLE = "“”„‟«»", "'‘’‚`"
# Words and numbers of other languages, and what to do.
_WORDS = {
    "True": "write true",
    "False": "write false",
    "None|undefined|nan|NaN|NULL|Null|nil": "remove the field to use its default",
    r"\.[0-9]": "write 0.5 instead of .5",
    r"\+[0-9]": "write numbers without +",
}
_COMMENT = re.compile(r"#|//|/\*")
_FOUND_COMMENT = ("a comment", "remove it: JSON has no comments")
_PER_LINE = "write one JSON object per line"
NO_LIST = f"{_PER_LINE}, without a list around them"
_PATHS = 'write paths with forward slashes, "photos/a.png", and other backslashes twice'
_IN_TEXT = 'write \\" for a quote in a text, \\n for a line end and \\t for a tab'


def explain(text: str, error: json.JSONDecodeError) -> tuple[str, str]:
    """Return what is wrong with a line, with the column, and a hint."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :].rstrip()
    what, hint = _found(text, error.msg, before, rest)
    return f"not valid JSON: {what} at column {error.pos + 1}", hint


def ends_early(text: str) -> bool:
    """Return True if a text is the beginning of a JSON list or object that goes on."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.startswith(("{", "[")) and not text[error.pos :].strip()
    except (ValueError, RecursionError):
        pass
    return False


def _found(text: str, message: str, before: str, rest: str) -> tuple[str, str]:
    first = rest[:1]
    if "escape" in message:
        return "a backslash that is not an escape", _PATHS
    if "control character" in message:
        return "a tab or another control character", _IN_TEXT
    if first and first in _SINGLE:
        return "single quotes", 'write double quotes: "prompt"'
    if (first and first in _CURLY) or ("Unterminated" in message and {*_CURLY} & {*rest}):
        return "curly quotes", 'write straight double quotes: "prompt"'
    if "Unterminated" in message:
        return "a text without an end", f'close it with "; {_IN_TEXT}'
    if "trailing comma" in message or (first in ("}", "]") and before.endswith(",")):
        return "a comma before the end", f"remove the comma before {first if first != ',' else '}'}"
    if message == "Extra data" and before.endswith("}"):
        if first == ",":
            return "a comma after the object", "remove the comma at the end of the line"
        if _COMMENT.match(rest):
            return _FOUND_COMMENT
        return "more after the object", _PER_LINE
    for pattern, hint in _WORDS.items():
        if word := re.match(pattern, rest):
            return word[0], hint
    if _COMMENT.match(rest):
        return _FOUND_COMMENT
    if re.search(r"[0-9],$", before) and first.isdigit():
        return "a decimal comma", "write numbers with a point: 1.5"
    if re.search(r"[:\[,]\s*-?0$", before) and first.isdigit():
        return "a number that begins with 0", "write it without the 0"
    if not before.startswith("{") and not rest.startswith("{"):
        return "no object", f"{_PER_LINE}; a file with a prompt per line is named .txt"
    if not rest:
        return "the end of the line", f"{_PER_LINE}, and close it with }}"
    if message.startswith("Expecting property name"):
        return f"{first} instead of a name", 'write names in double quotes: {"prompt": "…"}'
    if "':'" in message:
        return f"{first} after a name", 'put a colon after a name: {"prompt": "…"}'
    if "','" in message:
        return f"{first} after a value", f"put a comma between fields; {_IN_TEXT}"
    return f"{first} instead of a value", 'write texts in double quotes: {"prompt": "…"}'
