"""What `--score ask:…` says: the questions, and what they need of a candidate."""

from collections.abc import Sequence
from pathlib import Path

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of

KINDS = ("ask", "ask2")


def questions_in(kind: str, text: str) -> tuple[str, ...]:
    """Return the questions of a scorer's target; none stands for the usual one. Raises UsageError.

    `text`: what follows the kind and its colon.
    """
    if not text:
        if kind == "ask2":
            hint = '--score ask2:"Is everything but the asked change as in the first picture?"'
            what = "ask2 needs a question"
            raise UsageError(what, where="--score", hint=hint, code="usage.scorer")
        return ()
    if not text.startswith("@"):
        return (text,)
    try:
        lines = text_of(Path(text[1:]), SETTINGS_BYTES).splitlines()
    except OSError as error:
        what = f"the questions cannot be read: {error.strerror}"
        raise UsageError(what, where=text[1:], code="usage.scorer") from None
    if not (found := tuple(line.strip() for line in lines if line.strip())):
        what, hint = "the file has no question", "write one question per line"
        raise UsageError(what, where=text[1:], hint=hint, code="usage.scorer")
    return found


def needs_of(kind: str, questions: Sequence[str]) -> list[str]:
    """Return what a scorer must be shown of a candidate."""
    needs = ["prompt", "result", "model"] + (["source"] if kind == "ask2" else [])
    return needs + (["expect"] if any("{expect}" in one for one in questions) else [])
