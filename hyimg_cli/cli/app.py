"""The `hyimg` command: its subcommands, and the one place where errors become exit codes."""

import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from hyimg_cli import __version__
from hyimg_cli.cli import help as pages
from hyimg_cli.cli import later, render
from hyimg_cli.cli.bench import bench
from hyimg_cli.cli.cache import cache
from hyimg_cli.cli.check import check
from hyimg_cli.cli.doctor import doctor
from hyimg_cli.cli.eval import evaluate
from hyimg_cli.cli.generate import generate
from hyimg_cli.cli.info import info
from hyimg_cli.cli.plan import plan
from hyimg_cli.cli.replay import replay
from hyimg_cli.errors import HyimgError, UsageError

INTERNAL_ERROR = 101

COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "check": check,
    "plan": plan,
    "bench": bench,
    "eval": evaluate,
    "doctor": doctor,
    "info": info,
    "replay": replay,
}

app = typer.Typer(
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


for _name, _command in COMMANDS.items():
    _text = pages.prose(_command.__doc__)
    _short = pages.first_sentence(_text)
    app.command(_name, cls=pages.Command, help=_text, short_help=_short)(_command)
app.add_typer(cache, name="cache")


@app.callback(invoke_without_command=True)
def _hyimg(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        render.line(f"hyimg {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line; errors are printed on stderr."""
    try:
        later.refuse(arguments)
        words = list(arguments) or ["--help"]
        code = app(args=words, prog_name="hyimg", standalone_mode=False, obj=tuple(words))
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
