"""The `hyimg` command: its subcommands, and the one place where errors become exit codes."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hyimg_cli import __version__
from hyimg_cli.cli import help as pages
from hyimg_cli.cli import render
from hyimg_cli.cli.commands import COMMANDS, LazyCommand
from hyimg_cli.cli.completion import joined_values
from hyimg_cli.cli.usage import usage_error
from hyimg_cli.errors import HyimgError, StorageError
from hyimg_cli.files import is_of_the_disk
from hyimg_cli.spec.printed import log_printable
from hyimg_cli.surroundings import open_closed_streams, require_surroundings, temporary_folder

INTERNAL_ERROR = 101
# The output of `hyimg` without a command.
FIRST_DAY = """\
Usage: hyimg COMMAND [OPTIONS]

Edit and generate pictures and videos in batches. To start:

  hyimg doctor                                      check this machine
  hyimg generate photos --prompt "make it evening"  edit every picture in a folder
  hyimg check jobs.jsonl                            report every error in a manifest
  hyimg plan jobs.jsonl                             show what a run would do

To try it, run `hyimg generate quickstart`, which draws nine samples. `hyimg --help`
lists all commands, and `hyimg COMMAND --help` explains one."""
logger = logging.getLogger(__name__)

_app = typer.Typer(
    name="hyimg",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": pages.WIDEST},
    help="Edit and generate pictures and videos in batches, from a manifest or from pictures and "
    "a prompt.",
    epilog="Exit codes: 0 all done, 1 a job or a gate failed, 2 wrong usage or manifest, 3 this "
    "machine cannot run it, 101 internal error, 130 or 143 interrupted (run the same command "
    "again to resume).",
)


@_app.callback(invoke_without_command=True)
def _hyimg(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        render.line(f"hyimg {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        render.lines(FIRST_DAY)


def command_line() -> TyperGroup:
    """Return the whole command line for the parser; commands are imported when they are used."""
    group = get_command(_app)
    assert isinstance(group, TyperGroup)
    for name in COMMANDS:
        group.add_command(LazyCommand(name))
    return group


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed on stderr."""
    open_closed_streams()
    log_printable()
    try:
        require_surroundings(next((word for word in arguments if word in COMMANDS), ""))
        joined_values(os.environ)
        words = tuple(arguments)
        code = command_line().main(list(words), "hyimg", standalone_mode=False, obj=words)
        return code if isinstance(code, int) else 0
    except HyimgError as error:
        return _print_error(error)
    except typer.TyperException as error:
        return _print_error(usage_error(error, arguments))
    except Exception as error:
        # A file name that the disk refuses or a folder without permission is not a bug in hyimg.
        name = getattr(error, "filename", None)
        if isinstance(error, OSError) and name is not None and is_of_the_disk(error.errno):
            logger.debug("refused by the disk", exc_info=error)
            return _print_error(StorageError(f"{error.strerror}", where=str(name)))
        try:
            temporary_folder()  # some need one only now and then, as for an object store
        except StorageError as lacking:
            return _print_error(lacking)
        render.internal_error(traceback.format_exc())
        return INTERNAL_ERROR


def _print_error(error: HyimgError) -> int:
    render.error(error)
    return error.exit_code


def main() -> None:
    """Run the command line of this process and exit with its code (the console script)."""
    logging.captureWarnings(True)
    code = run(sys.argv[1:])
    if "pyarrow" in sys.modules:
        # NOTE: its threads are still alive when the interpreter ends, and about once in 250 times
        # they abort the process (exit code 134). Everything is written by now.
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
