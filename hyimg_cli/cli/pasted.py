"""Command lines from a web page or a word processor, and long options with one hyphen."""

import os
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence

from hyimg_cli.cli import other_words
from hyimg_cli.errors import UsageError
from hyimg_cli.settings.other_names import plain

_DASHED = re.compile(r"[‐‑‒–—―−]+-?([A-Za-z][\w-]*)(=.*)?", re.DOTALL)
_ONE_HYPHEN = re.compile(r"-([A-Za-z][\w-]+)(=.*)?", re.DOTALL)
_NAMED = re.compile(r"([a-z][a-z-]+)=")
# What ends a text that begins with one of these.
_CURLY = {"“": "”", "„": "“”", "‘": "’", "‚": "‘’", "«": "»", "»": "«"}


def refuse(words: Sequence[str], options: Mapping[str, bool]) -> None:
    """Raise UsageError for other dashes than hyphens, curly quotes, and options such as `-prompt`.

    `options`: a command's options, each with True if it takes a value.
    """
    before = ""
    for at, word in enumerate(words):
        if word == "--":
            return
        _refuse_curly(words, at, before)
        if not (options.get(before) or os.path.lexists(word)):
            _refuse_option(word, options)
        before = word


def hint_of_dashes(word: str) -> str:
    """Return what to write for an option that begins with another dash; empty for other words."""
    if not (dashed := _DASHED.fullmatch(word)):
        return ""
    is_short = len(dashed[1]) == 1
    return f"write {'one hyphen: -' if is_short else 'two hyphens: --'}{dashed[1]}"


def _refuse_option(word: str, options: Mapping[str, bool]) -> None:
    """Raise UsageError for a word that is meant as an option."""
    if hint := hint_of_dashes(word):
        what = f"{word} begins with {_named(word[0])}, not with a hyphen"
        raise UsageError(what, hint=hint)
    named = _NAMED.match(word)
    if named and f"--{named[1]}" in options:
        raise UsageError(f"{named[0]} is not an option", hint=f"write --{named[1]}")
    found = _ONE_HYPHEN.fullmatch(word)
    if found and (hint := _with_two(found[1], options)):
        what = f"{word} has one hyphen, which is for options of one letter"
        raise UsageError(what, hint=hint)


def _with_two(name: str, options: Mapping[str, bool]) -> str:
    """Return what to write for an option with one hyphen; empty if it is not a long option."""
    (same,) = [one for one in options if one[:2] == "--" and plain(one) == plain(name)][:1] or [""]
    return f"write {same}" if same else other_words.advice(name, options)


def _refuse_curly(words: Sequence[str], at: int, before: str) -> None:
    """Raise UsageError for a text of several words in curly quotes, which no shell groups."""
    name, equals, text = words[at].rpartition("=")
    if (ends := _CURLY.get(text[:1])) is None or " " in text:
        return
    last = next((n for n in range(at + 1, len(words)) if words[n][-1:] in tuple(ends)), None)
    if last is None or any(" " in word for word in words[at : last + 1]):
        return
    text = " ".join((text, *words[at + 1 : last + 1]))
    option = name + equals or (f"{before} " if before.startswith("-") else "")
    hint = f"write straight quotes: {option}{shlex.quote(text[1:-1])}"
    raise UsageError(f"curly quotes do not group words: {text}", hint=hint.replace("'", '"'))


def _named(character: str) -> str:
    """Return the name of a character with an article."""
    name = unicodedata.name(character).lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
