"""Layout of help pages: plain lines wrapped to the terminal's width, options by panel.

Typer's boxes cut off names that are too long for their column. Here such a name has a line of its
own.
"""

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from hyimg_cli.cli import pasted, render
from hyimg_cli.spec.options import MODEL, RUN, SAMPLING, VIDEO

# Lines end where the terminal does, however wide it is.
WIDEST = 10_000
# A command's other panels are shown before the last two.
_FIRST = ("Arguments", RUN, "Selection", MODEL, SAMPLING, VIDEO)
_LAST = ("Style", "Options")
# Accepted, but one name is enough to read.
_ANOTHER_NAME = ", --output-dir"


class Command(TyperCommand):
    """A command whose help lists the options of each panel under its name."""

    shows_all = True

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.rare = [one for one in self.params if isinstance(one, TyperOption) and one.hidden]
        for option in self.rare:
            # A shell completes every option, and a page with all options shows these.
            option.hidden = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command's words; raise UsageError for those that a shell never means so."""
        options = [one for one in self.get_params(ctx) if isinstance(one, TyperOption)]
        takes_value = {
            name: not (one.is_flag or one.count)
            for one in options
            for name in (*one.opts, *one.secondary_opts)
        }
        if not ctx.resilient_parsing:  # otherwise a shell completes half a line
            pasted.refuse(args, takes_value)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or (parameter in self.rare and not self.shows_all):
                continue
            record = (record[0].replace(_ANOTHER_NAME, ""), record[1])
            if isinstance(parameter, TyperOption):
                panel = parameter.rich_help_panel or (_LAST[1] if parameter.is_eager else RUN)
                panels.setdefault(panel, []).append(record)
            elif isinstance(parameter, TyperArgument):
                name = parameter.metavar or parameter.name or ""
                panels.setdefault(_FIRST[0], []).append((name, record[1]))
        others = [name for name in panels if name not in (*_FIRST, *_LAST)]
        for name in (*_FIRST, *others, *_LAST):
            if name in panels:
                with formatter.section(name):
                    formatter.write_dl(panels[name])


class LongCommand(Command):
    """A command with many options: `--help` shows the basic ones, `--help-all` shows all."""

    shows_all = False


def show_all(ctx: typer.Context, is_asked: bool) -> None:
    """Print the help page with every option and exit (`--help-all`)."""
    if is_asked:
        assert isinstance(ctx.command, LongCommand)
        ctx.command.shows_all = True
        render.lines(ctx.get_help())
        raise typer.Exit
