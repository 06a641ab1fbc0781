"""The list of commands, with the first sentence of each one's help.

A command is imported only when it runs or its own help page is shown.
"""

import ast
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from hyimg_cli.cli import help as pages

# Commands with the options of a run; their help pages do not import the command's module.
OF_A_RUN = ("generate", "check", "plan")
COMMANDS = (
    *(
        *OF_A_RUN,
        "serve",
        "think",
        "score",
        "pick",
        "manifest",
        "merge",
        "status",
        "diff",
        "report",
        "export",
    ),
    *("pull", "info", "replay", "doctor", "eval", "bench", "cache", "schema", "explain"),
)


class LazyCommand(TyperCommand):
    """A command that is imported when it is used; only its line in the list needs no import."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return f"{re.split(r'[.](?: |$)', help_of(str(self.name)), flags=re.M)[0]}."

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self.load_command().make_context(*arguments, **more)

    def load_command(self) -> Any:
        """Import the command and return it with its parameters, for parsing and the help page."""
        name = str(self.name)
        if name in OF_A_RUN:
            from hyimg_cli.cli.options import run_command  # reads every setting

            return _build(name, run_command(lambda ctx: _function(name)(ctx)))
        found = _function(name)
        return get_command(found) if isinstance(found, typer.Typer) else _build(name, found)


def help_of(name: str) -> str:
    """Return the docstring of a command, read without importing it.

    Each paragraph is one line, to be wrapped to the terminal's width.
    """
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text("utf-8"))
    functions = (one for one in tree.body if isinstance(one, ast.FunctionDef))
    own = next(one for one in functions if one.name == ("evaluate" if name == "eval" else name))
    paragraphs = (ast.get_docstring(own) or "").split("\n\n")
    # The parser leaves the lines after \\b as they are.
    return "\n\n".join(one if one[0] == "\b" else " ".join(one.split()) for one in paragraphs)


def _function(name: str) -> Any:
    """Import a command's function: `check` from `cli.check`, but `evaluate` for `eval`."""
    module = import_module(f"hyimg_cli.cli.{name}")
    return getattr(module, {"eval": "evaluate", "cache": "commands"}.get(name, name))


def _build(name: str, function: Callable[..., None]) -> Any:
    is_long = "help_all" in inspect.signature(function).parameters
    page = pages.LongCommand if is_long else pages.Command
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=page, help=help_of(name))(function)
    return get_command(alone)
