"""Print messages to stderr and data to stdout, with untrusted text made safe. `progress` prints
the progress of a run.
"""

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer

from hyimg_cli.errors import HyimgError, StorageError, UsageError
from hyimg_cli.spec.printed import printable

PROGRESS = ("auto", "rich", "plain", "none")
# Of one fault that many lines have, so many are named.
PLACES = 10
# Characters of a message's part.
LONGEST = 2000


def line(text: str) -> None:
    """One line of data, on stdout.

    Raises StorageError where it cannot be written; a reader that closed its pipe is typer's.
    """
    try:
        print(printable(text, sys.stdout.encoding or "utf-8"), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output cannot be written: {error.strerror}") from error


def lines(text: str) -> None:
    """Data of several lines, on stdout."""
    for one in text.split("\n"):
        line(one)


def note(text: str, *, before: str = "") -> None:
    """One line for the reader, on stderr; `before` it our own words, as they are. A reader who is
    gone, or a full log, ends no run.
    """
    with suppress(OSError):
        # In one piece: a run's status comes from a thread of its own.
        print(f"{before}{printable(text)}\n", end="", file=sys.stderr, flush=True)


def note_unless(is_quiet: bool) -> Callable[[str], object]:
    """Return `note`, or what prints nothing where only errors are wanted."""
    return str if is_quiet else note


def remarks(texts: Iterable[str], style: "Style") -> None:
    """Say what the reader should know, unless only errors are wanted."""
    for text in texts:
        if not style.is_quiet:
            note(f"note: {text}")


def command_line(ctx: typer.Context, *, without: Collection[str] = ()) -> str:
    """The command that is running, as typed, to run it again."""
    return shlex.join(["hyimg", *(word for word in ctx.obj if word not in without)])


def json_line(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of stdout."""
    line(json.dumps(value, ensure_ascii=False))


def error(fault: HyimgError) -> None:
    """An error as `error[code]: what / --> where / hint: …`; of several faults, each."""
    errors((*getattr(fault, "faults", ()), fault))


def errors(faults: Iterable[HyimgError]) -> None:
    """Each fault, in order; one that many lines have is told once, with the first of its places."""
    same_faults: dict[tuple[str, str, str], list[HyimgError]] = {}
    for fault in faults:
        same_faults.setdefault((fault.code, fault.what, fault.hint), []).append(fault)
    # As elsewhere: no colour for a reader that is no terminal, or who wants none.
    has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    for (code, what, hint), same in same_faults.items():
        head = f"error[{code}]"
        head = typer.style(head, fg="red", bold=True) if has_colour else head
        note(f": {shorten(what)}", before=head)
        for one in same[:PLACES]:
            if one.where:
                note(f"  --> {shorten(one.where)}")
        if len(same) > PLACES:
            # Pairs of eval are no jobs.
            by = "" if code == "eval.pair" else "; hyimg check --json names every one"
            note(f"  --> and {len(same) - PLACES} more{by}")
        if hint:
            note(f"  hint: {shorten(hint)}")


def shorten(text: str) -> str:
    """A text, perhaps a whole file, as far as a message has room for it."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def internal_error(trace: str) -> None:
    """A mistake of ours: the traceback, and what to do with it."""
    what = "error[internal]: this is a bug in hyimg"
    hint = "  hint: report it with the lines above; finished results are kept"
    for text in (*trace.rstrip().split("\n"), what, hint):
        note(text)


def log_to_stderr(verbosity: int) -> None:
    """Log records of hyimg and the libraries: warnings, with -v infos, with -vv everything."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@dataclass(frozen=True)
class Style:
    """How a command shows its work."""

    progress: str
    is_quiet: bool
    as_json: bool


def style_of(given: Mapping[str, Any]) -> Style:
    """The style that a command line asks for. Raises UsageError for one that does not exist."""
    if given["progress"] not in PROGRESS:
        hint = f"allowed: {', '.join(PROGRESS)}"
        raise UsageError(f"--progress {given['progress']!r} is not known", hint=hint)
    return Style(given["progress"], given["quiet"], given["as_json"])
