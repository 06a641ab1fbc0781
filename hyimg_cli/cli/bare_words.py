"""Words on a command line that are values of options which were left out."""

import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from hyimg_cli.cli.completion import MANIFESTS

# A value of an option that a command cannot do without.
_NEEDED = {
    ("merge", "-o"): "all",
    ("think", "-o"): "texts.jsonl",
    ("bench", "--compare"): "kv-reuse",
}
_PORT = re.compile(r"(?:(.*):)?(\d{1,5})/?")


def with_options(arguments: Sequence[str], bare: Sequence[str], needed: str = "") -> str:
    """Return the command line with an option before each bare word.

    `needed`: an option that is missing. Empty if a word could be of no option.
    """
    command, rest = arguments[0], list(arguments[1:])
    for word in bare:
        if word not in rest or not (option := _option_for(command, word)):
            return ""
        at = len(rest) - 1 - rest[::-1].index(word)
        rest[at : at + 1] = option
    example = _NEEDED.get((command, needed))
    if example and needed not in rest:
        rest += needed, example
    if [command, *rest] == [*arguments]:
        return ""
    return f"run {shlex.join(['hyimg', command, *rest])}".replace("'", '"')


def values(arguments: Sequence[str]) -> list[str]:
    """Return the words after a command that neither are options nor follow one."""
    return [
        word
        for before, word in pairwise(arguments)
        if not before.startswith("-") and not word.startswith("-")
    ]


def _option_for(command: str, word: str) -> list[str]:
    """Return an option of the command with its value; empty if the word fits none."""
    number = word.isascii() and word.isdigit()
    match command:
        case "serve":
            return _for_server(word)
        case "bench":
            if word.endswith(MANIFESTS):
                return ["--manifest", word]
            return [] if number else ["--model", word]
        case "pick":
            return ["--pick", word] if number else ["--by", word]
        case "score":
            return [] if number else ["--score", word]
    return []


def _for_server(word: str) -> list[str]:
    address = word.partition("://")[2] or word
    host, port = (found[1], found[2]) if (found := _PORT.fullmatch(address)) else (address, "")
    if not port and (os.path.lexists(word) or not re.fullmatch(r"localhost|[\d.]+|::1?", host)):
        return ["--model", word]
    return [*(["--host", host] if host else []), *(["--port", port] if port else [])]
