"""What is wrong with a command line that the parser refuses, and what to write instead."""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any

import typer

from hyimg_cli.cli import bare_words, other_words, pasted
from hyimg_cli.cli import help as pages
from hyimg_cli.cli.commands import COMMANDS, OF_A_RUN, LazyCommand
from hyimg_cli.cli.completion import MANIFESTS
from hyimg_cli.errors import UsageError, required
from hyimg_cli.settings.other_names import lacking, plain
from hyimg_cli.spec.units import names_text

# Options of earlier versions, with what to do instead; by command where others still have them.
_REMOVED = {
    "--rounds": "draw more with a higher --n; existing candidates are kept",
    "--audit": "leave the scorer out of hyimg pick --by NAME; out/scores.jsonl has its values",
    "hyimg pick --score": "score with hyimg score, then choose scorers with hyimg pick --by NAME",
}
_EXTRA = re.compile(r"unexpected extra argument.*\((.*)\)$")
_PROMPTED = ("photos", "--prompt", "make it evening")


def usage_error(error: "typer.TyperException", arguments: Sequence[str]) -> UsageError:
    """Return the parser's error as UsageError, with what to write and the right help page."""
    context, what = getattr(error, "ctx", None), error.format_message()
    page = "--help-all" if context and isinstance(context.command, pages.LongCommand) else "--help"
    path = " ".join(["hyimg", *(word for word in arguments[:1] if word in COMMANDS)])
    path = context.command_path if context else path
    if path == "hyimg":
        what = getattr(error, "message", what)  # without the guesses of the parser
        hint = _for_no_command(arguments)
        what = what.partition(" Did you mean")[0] if hint else what
    elif context and (given := getattr(error, "option_name", "")):
        what, hint = _for_option(error.message, str(given), context)
    else:
        hint = _for_missing(error, path, arguments) or _for_bare_words(error, arguments)
    every = "commands" if path in ("hyimg", "hyimg cache") else "options"
    what = required(what.replace(" / '--output-dir'", "").replace("Input should be", "it must be"))
    lists = f"{path} {page} lists all {every}"
    between = " " if hint.endswith("?") else "; "
    return UsageError(what, hint=f"{hint}{between}{lists}" if hint else lists)


def _for_option(what: str, given: str, context: typer.Context) -> tuple[str, str]:
    """Return what is wrong with an option, and a hint."""
    command, path = context.command, context.command_path
    flags = _flags_of(command)
    if given in flags:  # its value is missing
        return what, ""
    if found := lacking(given):
        return f"{given} is not supported: hyimg has no {found[0]}", found[1]
    if hint := _REMOVED.get(given, _REMOVED.get(f"{path} {given}", "")):
        return f"{path} has no {given}: it was removed", hint
    close = other_words.misspelt(given, flags)
    if close and given.startswith("--") and plain(close[0]) == plain(given):
        return what, f"write {close[0]}"
    names = [one.metavar or "" for one in command.params if one.param_type_name == "argument"]
    usage = " ".join((path, *names)) if names else ""
    hint = other_words.without_option(given, usage, takes_prompt="--prompt" in flags)
    if names and hint:
        return what, hint
    others = {name: _flags_of(LazyCommand(name).load_command()) for name in COMMANDS}
    if hint := other_words.advice(given, flags, others):
        return what, hint
    return what, f"did you mean {names_text(close, 3)}?" if close else ""


def _for_no_command(arguments: Sequence[str]) -> str:
    """Return a hint for words that do not begin with a command."""
    word, others = arguments[0], arguments[1:]
    if meant := other_words.COMMANDS.get(word.lower()):
        if meant == "--help" and others and others[0] in COMMANDS:
            return f"run hyimg {others[0]} --help"
        if meant[0] == "-":
            return f"run hyimg {meant}"
        example = _PROMPTED if meant == "generate" else ["jobs.jsonl"] * (meant in OF_A_RUN)
        return f"run {shlex.join(['hyimg', meant, *(others or example)])}".replace("'", '"')
    if word.lower() in other_words.ENDS:
        return "press Ctrl-C where the run works, or send it SIGTERM; the same command resumes"
    if meant := other_words.NO_COMMANDS.get(word.lower()) or pasted.hint_of_dashes(word):
        return meant
    if close := other_words.misspelt(word, ("--help", "--version")) if word[:2] == "--" else ():
        return f"did you mean {close[0]}?"
    if word[:1] == "-":
        return "begin with a command, such as hyimg generate"
    if os.path.lexists(word) or word.endswith(MANIFESTS):
        is_manifest = word.endswith(MANIFESTS) or "--prompt" in others
        more = (*others, *(() if is_manifest else _PROMPTED[1:]))
        return f"run {shlex.join(['hyimg', 'generate', word, *more])}".replace("'", '"')
    if " " in word:
        return f"run hyimg generate {shlex.join([*others, '--prompt', word])}".replace("'", '"')
    return ""


def _for_missing(error: Any, path: str, arguments: Sequence[str]) -> str:
    """Return a hint for an option that a command needs, if a word looks like its value."""
    option = getattr(error, "param", None)
    if option is None or option.param_type_name != "option":
        return ""
    values = option.shell_complete(error.ctx, "") if error.ctx else ()
    word = next((one for one in arguments if one in {value.value for value in values}), "")
    return f"run {path} {option.opts[0]} {word}" if word else ""


def _for_bare_words(error: Any, arguments: Sequence[str]) -> str:
    """Return the whole command if words lack their options, or an option is missing."""
    if arguments[0] == "cache" and (meant := other_words.OF_THE_CACHE.get(arguments[-1])):
        return f"did you mean hyimg cache {meant}?"
    option = getattr(error, "param", None)
    if option is not None and option.param_type_name == "option":
        takes_words = any(one.param_type_name == "argument" for one in error.ctx.command.params)
        bare = [] if takes_words else bare_words.values(arguments)
        return bare_words.with_options(arguments, bare, needed=option.opts[0])
    if extra := _EXTRA.search(str(getattr(error, "message", ""))):
        return bare_words.with_options(
            arguments, [w for w in arguments[1:] if w in extra[1].split()]
        )
    return ""


def _flags_of(command: Any) -> Collection[str]:
    """Return the names of a command's options."""
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
