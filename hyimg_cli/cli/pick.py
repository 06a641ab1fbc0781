"""`hyimg pick`: pick the best of each line's candidates by the scores of a run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli.picks import RUN_OR_TEXTS, refresh_pages, show_picks
from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, bytes_of, json_of, replace_file
from hyimg_cli.journal.journal import json_line
from hyimg_cli.journal.journal_file import lines_in
from hyimg_cli.journal.picks import (
    ScoresFile,
    append_choices,
    read_choices,
    write_picks,
)
from hyimg_cli.settings.values import nearest, shown
from hyimg_cli.spec.units import names_text

if TYPE_CHECKING:
    from hyimg_cli.scoring.candidates import Groups

Choice = tuple[str, dict[str, Any]]
_CODE = "usage.choice"


@o.takes("keep", "min", "max", basic=("keep", "min", "max"))
def pick(
    ctx: typer.Context,
    run: Path = RUN_OR_TEXTS,
    recipe: Path | None = o.RECIPE,
    by: list[str] | None = o.option(
        "Rank by this scorer only, instead of all that scored the run. Repeatable.",
        is_basic=True,
        metavar="<scorer>",
    ),
    choose: list[str] | None = o.option(
        "Choose a candidate yourself: LINE=CANDIDATE, LINE=none, or LINE=rule to undo.",
        is_basic=True,
        metavar="<id=id>",
    ),
    choices: Path | None = o.option(
        "Read choices from a file that the page saved.", parser=o.folder, metavar="<path>"
    ),
    output: Path | None = o.output("Write the picked lines as a manifest.", is_basic=True),
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
    help_all: bool = o.HELP_ALL,
) -> None:
    """Pick the best of each line's candidates by their scores, with a reason for each rejected one.

    \b
    hyimg pick out --by text --min text=0.5
    hyimg pick out --choose cat=cat-2

    Gates come first, then the mean rank over the scorers. Nothing is scored or drawn. Exit code 1:
    a line has no accepted candidate.
    """
    from hyimg_cli.scoring.candidates import all_in, read_pool
    from hyimg_cli.scoring.pick import pick as picked_of
    from hyimg_cli.scoring.pick import rule_of

    if run.name.isdigit() and not run.exists():
        hint = f"run hyimg pick OUT --pick {run.name}, with the output folder of the run"
        raise UsageError("no run is given", where=run, hint=hint)
    config = o.run_config(o.settings_of(ctx.params), run).candidates
    pool, finals = read_pool(run)
    file = ScoresFile(run)
    names = [name for text in by or () for name in text.split(",")]
    rule = rule_of(config, file.declared, names)
    if given := [*_chosen(choose or ()), *(_saved(choices) if choices else ())]:
        for where, one in given:
            _check_choice(one, pool, where)
        append_choices(run, [one for _, one in given])
    picks = picked_of(pool, finals, file.means(), rule, read_choices(run))
    write_picks(run, picks)
    refresh_pages(run)
    if output is not None:
        picked = {name for one in picks for name in one["picked"]}
        lines = [one.line for one in all_in(pool) if one.custom_id in picked]
        replace_file(output, b"".join(map(json_line, lines)))
    raise typer.Exit(show_picks(picks, is_quiet=quiet, as_json=as_json))


def _check_choice(choice: Mapping[str, Any], pool: "Groups", where: str) -> None:
    """Raise UsageError for a line or a candidate that the run does not have."""
    of = choice["candidate_of"]
    if of not in pool:
        close = nearest(of, [*pool])
        hint = f"did you mean {close}?" if close else f"its lines: {names_text([*pool])}"
        raise UsageError(f'"{of}" is not a line of this run', where=where, hint=hint, code=_CODE)
    by_name = {one.custom_id: one for one in pool[of]}
    for name in choice["picked"] or ():
        if name not in by_name:
            hint = f"its candidates: {names_text([*by_name])}"
            what = f'"{name}" is not a candidate of "{of}"'
            raise UsageError(what, where=where, hint=hint, code=_CODE)
        if not by_name[name].content:
            what, hint = f'"{name}" has no picture: it failed', "choose another candidate"
            raise UsageError(what, where=where, hint=hint, code=_CODE)


def _chosen(texts: Sequence[str]) -> Iterator[Choice]:
    """Yield the choices of --choose; several for one line are all picked, in their order."""
    by_line: dict[str, list[str]] = {}
    for text in texts:
        of, sign, name = text.partition("=")
        if not sign or not of or not name:
            hint = "write LINE=CANDIDATE, LINE=none, or LINE=rule"
            raise UsageError(f"{shown(text)} is not a choice", where="--choose", hint=hint)
        by_line.setdefault(of, []).append(name)
    for of, names in by_line.items():
        picked = None if names == ["rule"] else [] if names == ["none"] else names
        yield "--choose", {"candidate_of": of, "picked": picked}


def _saved(path: Path) -> Iterator[Choice]:
    """Yield the choices that the page saved. Raises UsageError for a line that is not a choice."""
    try:
        data = bytes_of(path, SETTINGS_BYTES)
    except OSError as error:
        raise UsageError(f"the choices cannot be read: {error.strerror}", where=path) from None
    for number, text in lines_in(data):
        where = f"{path}:{number}"
        try:
            line = json_of(text)
            of, picked = line["candidate_of"], line["picked"]
        except (ValueError, TypeError, KeyError):
            of = picked = None
        names = [] if picked is None else picked
        if (
            not isinstance(of, str)
            or not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
        ):
            hint = 'each line is {"candidate_of": LINE, "picked": [CANDIDATE]}: save the file again'
            what = "this line is not a choice"
            raise UsageError(what, where=where, hint=hint, code="usage.choice")
        yield where, {"candidate_of": of, "picked": picked}
