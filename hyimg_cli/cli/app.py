"""The `hyimg` command: its subcommands, and the one place where errors become exit codes."""

import sys
import traceback
from collections.abc import Sequence

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hyimg_cli import __version__
from hyimg_cli.cli import help as pages
from hyimg_cli.cli import render
from hyimg_cli.cli.commands import COMMANDS, LazyCommand, refuse_later
from hyimg_cli.errors import HyimgError, UsageError

INTERNAL_ERROR = 101

_app = typer.Typer(
    name="hyimg",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": pages.WIDEST},
    help="Make pictures and videos in batches: a manifest of jobs goes in, files come out.",
    epilog="Exit codes: 0 all done, 1 some job failed or a gate of bench, eval or replay, 2 usage "
    "or manifest, 3 machine, 101 internal error, 130/143 interrupted (run the same command again "
    "to resume).",
)


@_app.callback(invoke_without_command=True)
def _hyimg(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        render.line(f"hyimg {__version__}")
        raise typer.Exit


def command_line() -> TyperGroup:
    """The whole of it, for the parser; commands are imported when they are asked for."""
    group = get_command(_app)
    assert isinstance(group, TyperGroup)
    for name in COMMANDS:
        group.add_command(LazyCommand(name))
    return group


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line; errors are printed on stderr."""
    try:
        refuse_later(arguments)
        words = list(arguments) or ["--help"]
        code = command_line().main(
            args=words, prog_name="hyimg", standalone_mode=False, obj=tuple(words)
        )
        return code if isinstance(code, int) else 0
    except HyimgError as error:
        render.error(error)
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "hyimg"
        render.error(
            UsageError(error.format_message(), hint=f"{command} --help lists what there is")
        )
        return error.exit_code
    except Exception:
        render.internal_error(traceback.format_exc())
        return INTERNAL_ERROR


def main() -> None:
    """The console script: runs the process's own command line and exits with its code."""
    sys.exit(run(sys.argv[1:]))
