"""Help pages: every name whole on a narrow terminal, options under their panels, lines that fit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hyimg_cli.cli.app import command_line
from hyimg_cli.cli.commands import COMMANDS, LazyCommand


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        loaded = below.loaded() if isinstance(below, LazyCommand) else below
        yield from commands(loaded, (*words, name))


ALL = list(commands(command_line()))


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(("words", "command"), ALL, ids=[" ".join(words) for words, _ in ALL])
def test_no_name_is_cut(
    run_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    command: Any,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run_cli(*words, "--help").out
    # A comma is behind a name that has another after it.
    told = {word.rstrip(",") for word in shown.split()}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            assert {*parameter.opts, *parameter.secondary_opts} <= told
    assert "…" not in "".join(shown.split()).replace('{"a":…,"b":…}', "")
    assert max(map(len, shown.splitlines())) <= columns


def test_options_stand_under_their_panels(run_cli: Callable[..., Any]) -> None:
    page = run_cli("generate", "--help").out
    heads = [line for line in page.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == [
        "Arguments:",
        "Run:",
        "Selection:",
        "Model:",
        "Sampling defaults:",
        "Video (t2v):",
        "Style:",
        "Options:",
    ]
    assert page.index("Selection:") < page.index("  --select ") < page.index("Model:")


def test_the_list_of_commands_tells_each_in_a_whole_sentence(run_cli: Callable[..., Any]) -> None:
    listed = run_cli("--help").out.partition("Commands:")[2]
    assert "..." not in listed
    assert "  generate  Make the pictures and videos of a manifest.\n" in listed


def test_a_shell_completes_flags(
    run_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_HYIMG_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "hyimg generate --num")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit) as ended:
        run_cli()
    assert not ended.value.code
    assert capsys.readouterr().out.split() == ["--num-inference-steps", "--num-frames"]


def test_the_list_says_what_each_commands_own_help_begins_with() -> None:
    for words, command in ALL:
        if len(words) == 1:
            text = " ".join((command.help or "").split())
            assert text.startswith(COMMANDS[words[0]].rstrip(".")), words
