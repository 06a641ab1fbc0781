"""The table of commands: where each is, and what the list of commands says of it.

A command is imported when it is run or its own page is shown; nothing of it is for the list.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from hyimg_cli.cli import help as pages

# Of those that take the options of a run not even the help page needs the module.
OF_A_RUN = {
    "generate": (
        "Run the jobs in a manifest, or edit pictures with a prompt. Run the same command again "
        "to resume."
    ),
    "check": (
        "Check a manifest and report every error. Exit code 2: it would not run; 1: some source "
        "images are unreadable."
    ),
    "plan": (
        "Show what generate would do, without loading a model or writing files. Exit code 3: a "
        "model does not fit into memory_gb."
    ),
}
EXAMPLES = {
    "generate": """
hyimg generate quickstart
hyimg generate photos --prompt "make the background white"
hyimg generate jobs.jsonl --model ./checkpoint -o out"""
}
# The first sentence of each command's own help.
OTHERS = {
    "serve": "Serve an OpenAI-compatible API: durable batches and single requests.",
    "think": "Write the text of each job in a manifest, and draw nothing.",
    "score": "Score the pictures of a run, or the texts of hyimg think.",
    "pick": "Pick the best of each line's candidates by their scores, with a reason for each "
    "rejected one.",
    "manifest": "Write a manifest from pictures and prompts, to edit and run.",
    "merge": "Merge run folders into one, and list missing jobs.",
    "report": "Write a run's report: report.html, or a single file to share.",
    "export": "Make a training set of the accepted pictures of runs: Parquet, WebDataset or a "
    "folder.",
    "info": "Show how a picture or video was made: prompt, seed, model and versions.",
    "replay": "Run the job of a finished file again, and compare the pixels.",
    "doctor": "Check that this machine can run the chosen models, and draw a small test picture.",
    "eval": "Measure the distance between pictures or videos: two files, folders or runs, or many "
    "pairs.",
    "bench": "Compare engine variants: time by phase, picture distance, and a verdict.",
    "cache": "Show or clear the disk cache.",
    "schema": "Print the JSON Schema of a manifest line or a recipe.",
}
COMMANDS = OF_A_RUN | OTHERS


class LazyCommand(TyperCommand):
    """A command by name; all but its line in the list is the loaded one's."""

    def __init__(self, name: str) -> None:
        super().__init__(name, short_help=f"{COMMANDS[name].split('. ')[0].rstrip('.')}.")

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self.load_command().make_context(*arguments, **more)

    def load_command(self) -> Any:
        """The command with its parameters, for the parser and the help page."""
        name = self.name
        assert name is not None
        if name in OF_A_RUN:
            from hyimg_cli.cli.options import run_command  # reads every setting

            # The parser leaves lines behind \\b as they are.
            examples = f"\n\n\b{EXAMPLES[name]}" if name in EXAMPLES else ""
            text = f"{COMMANDS[name]}{examples}"
            return _build(name, run_command(lambda ctx: _function(name)(ctx)), text)
        found = _function(name)
        if isinstance(found, typer.Typer):
            return get_command(found)
        # A line for each paragraph, for the terminal to break where it ends.
        paragraphs = inspect.cleandoc(found.__doc__ or "").split("\n\n")
        return _build(name, found, "\n\n".join(" ".join(one.split()) for one in paragraphs))


def _function(name: str) -> Any:
    """The command's own: `check` of `cli.check`; `eval` would hide a built-in name."""
    module = import_module(f"hyimg_cli.cli.{name}")
    return getattr(module, "evaluate" if name == "eval" else name)


def _build(name: str, function: Callable[..., None], text: str) -> Any:
    is_long = "help_all" in inspect.signature(function).parameters
    page = pages.LongCommand if is_long else pages.Command
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=page, help=text)(function)
    return get_command(alone)
