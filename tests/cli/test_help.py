"""Help pages: whole names on narrow terminals, options under their panels, lines that fit."""

import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hyimg_cli.cli.app import command_line
from hyimg_cli.cli.commands import COMMANDS, OF_A_RUN, LazyCommand
from hyimg_cli.cli.help import LongCommand
from hyimg_cli.settings.table import SETTINGS

# Lines of a tall terminal that is 80 columns wide.
SCREEN = 54
# What a person who leaves a run alone for a night looks for.
NIGHT = {"follow", "time_limit", "job_timeout", "halt", "select", "retry_failed"}


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        loaded = below.load_command() if isinstance(below, LazyCommand) else below
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
    shown = run_cli(*words, "--help-all" if isinstance(command, LongCommand) else "--help").out
    # A comma is behind a name that has another after it.
    told = {word.rstrip(",") for word in shown.split()}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            # --output has a second name, which is not shown.
            assert {*parameter.opts, *parameter.secondary_opts} - {"--output-dir"} <= told
            assert "--output-dir" not in told
    assert "…" not in "".join(shown.split()).replace('{"a":…,"b":…}', "")
    assert "[[" not in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_options_stand_under_their_panels(run_cli: Callable[..., Any]) -> None:
    page = run_cli("generate", "--help-all").out
    heads = [line for line in page.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == [
        "Arguments:",
        "Run:",
        "Selection:",
        "Model:",
        "Sampling defaults:",
        "Video (t2v, i2v):",
        "Edits that change nothing else:",
        "Candidates:",
        "Style:",
        "Options:",
    ]
    assert page.index("Selection:") < page.index("  --select ") < page.index("Model:")


def test_the_command_alone_shows_a_first_day(run_cli: Callable[..., Any]) -> None:
    ran = run_cli()
    calls = [line for line in ran.out.splitlines() if line.startswith("  hyimg ")]
    assert len(calls) == 4
    assert {line.split()[1] for line in calls} <= set(COMMANDS)
    assert max(map(len, ran.out.splitlines())) <= 84
    assert "hyimg --help" in ran.out


def test_generate_has_three_examples_that_parse(run_cli: Callable[..., Any]) -> None:
    page = run_cli("generate", "--help").out.splitlines()
    examples = [line.strip() for line in page if line.startswith("  hyimg generate ")]
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example)
        LazyCommand("generate").make_context(words[1], words[2:])


@pytest.mark.parametrize("name", OF_A_RUN)
def test_the_first_screen_of_a_run_is_one_screen(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = run_cli(name, "--help").out
    assert len(page.splitlines()) <= SCREEN
    command = LazyCommand(name).load_command()
    options = [one for one in command.params if one.param_type_name == "option"]
    basic = {one.name for one in options if one not in command.rare}
    told = {word.rstrip(",") for word in page.split()}
    assert {one.name for one in options if not told.isdisjoint(one.opts)} == basic
    assert basic >= {row.name for row in SETTINGS.values() if row.is_basic}
    assert basic >= NIGHT
    assert 15 <= len(basic - {"help_all"}) <= 22


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["generate", "x", "--step", "3"], "--steps"),
        (["generate", "x", "--no-kv"], "--no-kv-reuse"),
        (["check", "x", "--temp", "1"], "--temperature"),
        (["plan", "x", "--modle", "y"], "--model"),
        (["bench", "--step", "3"], "--steps"),
        (["info", "--jsn"], "--json"),
        (["cache", "clear", "--knid", "x"], "--kind"),
        (["--hlep"], "--help"),
    ],
)
def test_a_misspelled_flag_is_told_the_one_that_is_meant(
    run_cli: Callable[..., Any], words: list[str], meant: str
) -> None:
    ran = run_cli(*words)
    assert ran.code == 2
    assert f"hint: did you mean {meant}? hyimg" in ran.err


def test_a_flag_like_no_other_is_told_where_all_are(run_cli: Callable[..., Any]) -> None:
    assert "  hint: hyimg plan --help-all lists" in run_cli("plan", "x", "--zzzzz").err
    assert "  hint: hyimg generate --help lists" in run_cli("generate", "x", "--steps").err


def test_the_list_of_commands_tells_each_in_a_whole_sentence(run_cli: Callable[..., Any]) -> None:
    listed = run_cli("--help").out.partition("Commands:")[2]
    assert "..." not in listed
    assert "  generate     Run the jobs in a manifest, or edit pictures with a prompt.\n" in listed


def test_the_list_says_what_each_commands_own_help_begins_with() -> None:
    for words, command in ALL:
        if len(words) == 1:
            text = " ".join((command.help or "").split())
            assert text.startswith(LazyCommand(words[0]).get_short_help_str().rstrip(".")), words
