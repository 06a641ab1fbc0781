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
# Places shown for a fault that many lines share.
PLACES = 10
# Maximum characters of each part of a message.
LONGEST = 2000


def line(text: str) -> None:
    """Print one line of data on stdout.

    Raises StorageError if it cannot be written. BrokenPipeError is left to typer.
    """
    try:
        print(printable(text, sys.stdout.encoding or "utf-8"), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output cannot be written: {error.strerror}") from error


def lines(text: str) -> None:
    """Print several lines of data on stdout."""
    for one in text.split("\n"):
        line(one)


def note(text: str, *, before: str = "") -> None:
    """Print one line for the user on stderr; `before` is trusted text, printed unchanged.

    Write errors, such as a closed pipe or a full disk, are ignored and do not end a run.
    """
    with suppress(OSError):
        # In one write: a run's status is printed by another thread.
        print(f"{before}{printable(text)}\n", end="", file=sys.stderr, flush=True)


def note_unless(is_quiet: bool) -> Callable[[str], object]:
    """Return `note`, or a function that prints nothing if only errors are wanted."""
    return str if is_quiet else note


def remarks(texts: Iterable[str], style: "Style") -> None:
    """Print notes for the user, unless only errors are wanted."""
    for text in texts:
        if not style.is_quiet:
            note(f"note: {text}")


def command_line(ctx: typer.Context, *, without: Collection[str] = ()) -> str:
    """Return the running command as typed, to run it again."""
    return shlex.join(["hyimg", *(word for word in ctx.obj if word not in without)])


def json_line(value: Mapping[str, Any]) -> None:
    """Print a JSON object on one line of stdout."""
    line(json.dumps(value, ensure_ascii=False))


def error(fault: HyimgError) -> None:
    """Print an error as `error[code]: what / --> where / hint: …`, or each of its faults."""
    errors((*getattr(fault, "faults", ()), fault))


def errors(faults: Iterable[HyimgError]) -> None:
    """Print each fault in order; one that many lines share once, with its first places."""
    same_faults: dict[tuple[str, str, str], list[HyimgError]] = {}
    for fault in faults:
        same_faults.setdefault((fault.code, fault.what, fault.hint), []).append(fault)
    # No colour if stderr is not a terminal, or if NO_COLOR is set.
    has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    for (code, what, hint), same in same_faults.items():
        head = f"error[{code}]"
        head = typer.style(head, fg="red", bold=True) if has_colour else head
        note(f": {shorten(what)}", before=head)
        for one in same[:PLACES]:
            if one.where:
                note(f"  --> {shorten(one.where)}")
        if len(same) > PLACES:
            note(f"  --> and {len(same) - PLACES} more; hyimg check --json names every one")
        if hint:
            note(f"  hint: {shorten(hint)}")


def shorten(text: str) -> str:
    """Return a text, perhaps a whole file, cut to the length that a message allows."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def internal_error(trace: str) -> None:
    """Print a bug's traceback, and how to report it."""
    what = "error[internal]: this is a bug in hyimg"
    hint = "  hint: report it with the lines above; finished results are kept"
    for text in (*trace.rstrip().split("\n"), what, hint):
        note(text)


def log_to_stderr(verbosity: int) -> None:
    """Log hyimg and the libraries to stderr: warnings; with -v infos, with -vv everything."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@dataclass(frozen=True)
class Style:
    """How a command shows its work."""

    progress: str
    is_quiet: bool
    as_json: bool


def style_of(given: Mapping[str, Any]) -> Style:
    """Return the style given on the command line. Raises UsageError for an unknown one."""
    if given["progress"] not in PROGRESS:
        hint = f"allowed: {', '.join(PROGRESS)}"
        raise UsageError(f"--progress {given['progress']!r} is not known", hint=hint)
    return Style(given["progress"], given["quiet"], given["as_json"])
