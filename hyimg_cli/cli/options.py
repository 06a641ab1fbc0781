"""Options that commands share: derived from the declarations of settings, and others.

A command's parameters carry the names of the settings they set; `None` means that the flag was not
given. The environment is read here; only `replay` reads it differently.
"""

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.addresses import joined
from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.cli import render
from hyimg_cli.cli.completion import among, manifests
from hyimg_cli.cli.help import show_all
from hyimg_cli.cli.recipe import FOLDERS_OWN, read_recipe, users_own
from hyimg_cli.errors import UsageError
from hyimg_cli.remote import keep_copies_in
from hyimg_cli.settings.config import Setting, build_run_config, settle
from hyimg_cli.settings.kinds import (
    FINISHED_RUN,
    FOLDER,
    NAMES,
    RUN_FOLDER,
    SCORER_NAMES,
    SCORER_OPTIONS,
    Kind,
    plain,
)
from hyimg_cli.settings.run import RunConfig
from hyimg_cli.settings.table import BY_NAME, PREFIX, SETTINGS, Declaration
from hyimg_cli.settings.values import BadValue, nearest, shown
from hyimg_cli.spec.job import AnyTask
from hyimg_cli.spec.options import CHECKPOINT, MODEL, RUN


def option(
    help: str,
    *names: str,
    default: Any = None,
    panel: str = RUN,
    is_basic: bool = False,
    **more: Any,
) -> Any:
    """Return an option, to be the default of a parameter; its flag is the parameter's name.

    `names`: flags to use instead. `panel`: the help panel that lists it, without its default.
    `is_basic`: True to show it on the first screen of a run's help.
    """
    shown: dict[str, Any] = {"rich_help_panel": panel, "hidden": not is_basic}
    return typer.Option(default, *names, help=help, **{"show_default": False} | shown | more)


switch = partial(option, default=False)
number = partial(option, metavar="<int>")


def _parser(kind: Kind, typed: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads an option's text and reports faults as the parser does."""

    def parse(text: str) -> Any:
        try:
            return typed(kind.parse(text))
        except BadValue as bad:
            raise typer.BadParameter(f"{bad.what}; {bad.hint}") from None

    return parse


# An empty name, for example from an unset variable, does not mean the working folder.
folder = _parser(FOLDER, Path)
finished_run = _parser(FINISHED_RUN, Path)
# A run's results may be at a remote address.
place = _parser(RUN_FOLDER, partial(joined, Path()))


def output(help: str, **more: Any) -> Any:
    """Return the `-o` option of a command without a run: a folder or a file to write."""
    path: dict[str, Any] = {"parser": folder, "metavar": "<path>"}
    return option(help, "-o", "--output", "--output-dir", **path | more)


def settings_for(command: str) -> tuple[str, ...]:
    """Return names of settings whose flags a command takes without a run's options."""
    return tuple(row.name for row in SETTINGS.values() if command in row.commands)


def takes(
    *names: str, panel: str = "", basic: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these settings; their values are in `ctx.params`.

    `panel`: the help panel for flags of runs and models, instead of their own panels. `basic`:
    those of them that its short help shows in addition to a run's.
    """

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters

        @wraps(command)
        def called(ctx: typer.Context, **given: Any) -> None:
            # Before 0.29, typer leaves paths in a context as text.
            ctx.params |= given
            command(ctx, **{name: value for name, value in given.items() if name in own})

        parameters = [*own.values(), *(_parameter(SETTINGS[n], panel, n in basic) for n in names)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return with_flags


def _parameter(row: Declaration, panel: str, is_basic: bool) -> inspect.Parameter:
    """Return a setting's flag: a switch, or text that the setting's kind parses."""
    is_truth = row.kind.schema is bool
    metavar = None if is_truth else f"<{row.kind.metavar}>"
    default = "" if row.default in (None, CHECKPOINT, "", False, ()) else f"default: {row.default}"
    default = "default: on" if row.default is True else default
    facts = "; ".join(filter(None, (row.kind.allowed, default)))
    help = f"{row.help}  [{facts}]" if facts else row.help
    flag = option(
        help,
        *row.spelled,
        panel=panel if panel and row.panel in (RUN, MODEL) else row.panel,
        is_basic=row.is_basic or is_basic,
        metavar=metavar,
        autocompletion=among(row.kind.choices) if row.kind.choices else None,
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # A flag for names takes several at once, and may be repeated.
    is_several = row.kind in (NAMES, SCORER_NAMES, SCORER_OPTIONS)
    of: Any = bool if is_truth else list[str] if is_several else str
    return inspect.Parameter(row.name, kind, default=flag, annotation=of | None)


INPUTS = typer.Argument(
    None,
    metavar="INPUT",
    autocompletion=manifests,
    help="Manifest (.jsonl, .csv, .tsv, .txt, - for standard input, quickstart, quickstart-video). "
    "With --prompt: folder, files or quoted pattern.",
)
PROMPT = option(
    "Apply this prompt, or each prompt in a .txt file.", is_basic=True, metavar="<text>"
)
TASK = option(
    "Task for --prompt; i2v starts a video from each picture.",
    parser=_parser(plain(AnyTask), str),
    metavar="<task>",
)
RECURSIVE = switch("Include pictures in subfolders.", "--recursive", is_basic=True)
RECIPE = option("Read settings from a TOML file.", is_basic=True)
NO_CONFIG = switch(
    "Ignore hyimg.toml in the working folder, and your own in ~/.config.", "--no-config"
)
FORCE = switch("Overwrite results made with different settings.", "--force", is_basic=True)
_select = partial(
    option,
    "Select ids (cat-*) or results (status=failed).",
    "--select",
    metavar="<pattern>",
    autocompletion=among(("status=done", "status=failed", "status=left")),
)
SELECT = _select(panel="Selection", is_basic=True)
SELECT_RESULTS = _select()
LIMIT = number("Select the first N jobs.", panel="Selection", is_basic=True, min=1)
SHARD = option(
    "Select part I of N, with jobs that share work in one part; auto takes I and N from the job "
    "scheduler.",
    panel="Selection",
    metavar="<I/N>",
)
AS_JSON = switch("Print results as JSON lines on standard output.", "--json", panel="Style")
QUIET = switch("Print only errors and failed jobs.", "-q", "--quiet", panel="Style")
VERBOSE = option(
    "Print more details; -vv prints everything.",
    "-v",
    "--verbose",
    default=0,
    panel="Style",
    count=True,
)
PROGRESS = option(
    "Progress display: auto (default), rich, plain or none.",
    default="auto",
    panel="Style",
    autocompletion=among(render.PROGRESS),
)
HELP_ALL = typer.Option(
    False, "--help-all", is_eager=True, callback=show_all, help="Show every flag and exit."
)


def run_command(command: Callable[[typer.Context], None]) -> Callable[..., None]:
    """Return `command` with every option of a run; their values are in `ctx.params`.

    `generate`, `plan` and `check` share this list, so each accepts the others' command lines.
    Options that matter only while jobs run have no effect on `plan` and `check`.
    """

    @takes(*(row.name for row in SETTINGS.values() if row.panel))
    def called(
        ctx: typer.Context,
        inputs: list[str] | None = INPUTS,
        prompt: list[str] | None = PROMPT,
        task: str | None = TASK,
        recursive: bool = RECURSIVE,
        recipe: Path | None = RECIPE,
        no_config: bool = NO_CONFIG,
        resume: bool = option(
            "Skip jobs that are already done (default).", "--resume/--no-resume", default=True
        ),
        retry_failed: bool = switch("Run failed jobs again.", "--retry-failed", is_basic=True),
        force: bool = FORCE,
        follow: bool = switch(
            "Wait for more pictures or lines, and run them.", "--follow", is_basic=True
        ),
        dry_run: bool = switch("Show the plan, as hyimg plan does, and exit.", "--dry-run"),
        select: list[str] | None = SELECT,
        limit: int | None = LIMIT,
        shard: str | None = SHARD,
        assume_think: int = number(
            "Assume texts of this many tokens in a plan (default 256).",
            default=256,
            panel="Style",
            min=0,
        ),
        progress: str = PROGRESS,
        as_json: bool = AS_JSON,
        quiet: bool = QUIET,
        verbose: int = VERBOSE,
        help_all: bool = HELP_ALL,
    ) -> None:
        command(ctx)

    return called


def settings_of(given: Mapping[str, Any]) -> dict[str, Setting]:
    """Return every setting with its value and origin, from flags, environment and recipe.

    A command with --no-config also reads `hyimg.toml` here and the user's own, and prints a note
    about each.
    """
    refuse_misspelt(os.environ)
    recipe = read_recipe(Path(given["recipe"])) if given.get("recipe") else {}
    flags = {name: given[name] for name in SETTINGS if name in given}
    for name, given_often in flags.items():
        if isinstance(given_often, list | tuple):
            split = SETTINGS[name].kind.split or list
            flags[name] = [one for text in given_often for one in split(text)] or None
    folders, own = _folders_own(given), _users_own(given)
    return settle(flags, os.environ, recipe, folders, users_own=own)


def refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a HYIMG_ variable whose name looks like a typing error.

    Any other unknown HYIMG_ variable is ignored: it may belong to another program.
    """
    for variable in sorted(environ.keys() - {row.variable for row in SETTINGS.values()}):
        name = variable.removeprefix(PREFIX)
        if name != variable and (close := nearest(name, BY_NAME, cutoff=0.75)):
            what = f"{shown(variable)} is not known"
            hint = f"did you mean {BY_NAME[close].variable}?"
            raise UsageError(what, where="environment", hint=hint, code="usage.unknown-variable")


def _folders_own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `hyimg.toml` here; none if it is ignored or is the recipe itself."""
    named = given.get("recipe")
    if (
        given.get("no_config", True)
        or not os.path.lexists(FOLDERS_OWN)
        or (named and FOLDERS_OWN.exists() and os.path.samefile(named, FOLDERS_OWN))
    ):
        return {}
    found = read_recipe(FOLDERS_OWN, is_named=False)
    told = f"{FOLDERS_OWN} in this folder sets {', '.join(found) or 'nothing'}"
    render.note_unless(given["quiet"])(f"{told}; --no-config ignores it")
    return found


def _users_own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the user's own `hyimg.toml`; none if it is ignored or missing."""
    path = users_own()
    if given.get("no_config", True) or path is None or not os.path.lexists(path):
        return {}
    if os.path.exists(FOLDERS_OWN) and os.path.exists(path) and path.samefile(FOLDERS_OWN):
        return {}  # the working folder is the one of the file
    title = str(path)
    with suppress(ValueError):
        title = f"~/{path.relative_to(Path.home())}"
    found = read_recipe(path, title=title)
    told = f"{title} sets {', '.join(found) or 'nothing'}"
    render.note_unless(given["quiet"])(f"{told}; --no-config ignores it")
    return found


def output_folder(settings: Mapping[str, Setting], manifest_name: str) -> Path:
    """Return the folder for results: the one given, else one under `runs`."""
    given = settings["output_dir"].value
    return joined(Path(), given) if given else Path("runs") / manifest_name


def cache_folder(settings: Mapping[str, Setting]) -> Path | None:
    """Return the disk cache's folder: the one given, else the user's; None without a home."""
    given, shared = settings["cache_dir"].value, Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if given is not None:
            return Path(given).expanduser()
        # The XDG specification says to ignore a relative path.
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "hyimg"
    except RuntimeError:  # a user without a home
        return None


def run_config(settings: Mapping[str, Setting], folder: Path) -> RunConfig:
    """Return the run configuration that the settings describe, with results in `folder`."""
    has_cache = settings["disk_cache"].value
    config = build_run_config(settings, folder, cache_folder(settings) if has_cache else None)
    keep_copies_in(DiskStore(config.cache.folder, config.cache.budget_bytes))
    return config
