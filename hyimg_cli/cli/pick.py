"""`hyimg pick`: pick the best of each line's candidates by the scores of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.picks import RUN_OR_TEXTS, refresh_pages, show_best_of, show_picks
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.journal import json_line
from hyimg_cli.journal.picks import (
    CANDIDATES,
    ScoresFile,
    append_choices,
    read_choices,
    read_lines,
    write_picks,
)
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.settings.config import Setting
from hyimg_cli.settings.table import SETTINGS
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.options import CANDIDATES as CANDIDATES_PANEL

# Settings of the pick rule, and of drawing more candidates for --rounds; lines have the rest.
_SETTINGS = tuple(
    row.name
    for row in sorted(SETTINGS.values(), key=lambda row: row.panel != CANDIDATES_PANEL)
    if row.panel == CANDIDATES_PANEL or "doctor" in row.commands
    if row.only != "videos" and row.name not in ("draft_steps", "model")
)


@o.takes(*_SETTINGS, panel="Drawing more candidates (--rounds)")
def pick(
    ctx: typer.Context,
    run: Path = RUN_OR_TEXTS,
    recipe: Path | None = o.RECIPE,
    choose: list[str] | None = o.option(
        "Choose a candidate yourself: LINE=CANDIDATE, LINE=none, or LINE=rule to undo.",
        is_basic=True,
        metavar="<id=id>",
    ),
    choices: Path | None = o.option(
        "Read choices from a file that the page saved.", parser=o.folder, metavar="<path>"
    ),
    output: Path | None = o.output("Write the picked lines as a manifest.", "--output"),
    progress: str = o.PROGRESS,
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Pick the best of each line's candidates by their scores, with a reason for each rejected one.

    Gates come first, then the mean rank over the scorers. Nothing is scored or drawn, unless
    --rounds asks for more candidates. Exit code 1: a line has no accepted candidate.
    """
    from hyimg_cli.scoring.candidates import all_in, read_pool
    from hyimg_cli.scoring.pick import pick as picked_of
    from hyimg_cli.scoring.pick import rule_of

    style = render.style_of(ctx.params)
    settings = o.settings_of(ctx.params)
    config = o.run_config(settings, run)
    pool, finals = read_pool(run)
    if given := [*_chosen(choose or ()), *(_saved(choices) if choices else ())]:
        known = {one.custom_id: one.of for one in all_in(pool)}
        for one in given:
            for name in one["picked"] or ():
                if known.get(name) != one["candidate_of"]:
                    what = f'"{name}" is not a candidate of "{one["candidate_of"]}"'
                    raise UsageError(what, where="--choose", code="usage.choice")
        append_choices(run, given)
    if config.candidates.rounds > 1:
        if not (run / CANDIDATES).is_file():
            what = "the run does not record how its candidates were drawn"
            hint = "add --rounds to the hyimg generate command that drew them"
            raise UsageError(what, where=run, hint=hint, code="usage.rounds")
        # Draft steps as for the first candidates; each line is already one candidate.
        counts = (one.result.get("denoise_steps") for some in pool.values() for one in some)
        steps = max(filter(None, counts), default=None) if finals is not None else None
        config = replace(config, candidates=replace(config.candidates, draft_steps=steps))
        settings |= {"n": Setting("n", 1, "default")}
        request = RunRequest(read_manifest(run / CANDIDATES), config, settings)
        raise typer.Exit(show_best_of(request, style, again=render.command_line(ctx)))
    if config.candidates.score:
        hint = "run hyimg score RUN --score … first, or add --rounds"
        raise UsageError("without --rounds, hyimg pick does not score", where="--score", hint=hint)
    file = ScoresFile(run)
    rule = rule_of(config.candidates, file.declared)
    picks = picked_of(pool, finals, file.scores, rule, read_choices(run))
    write_picks(run, picks)
    refresh_pages(run)
    if output is not None:
        names = {name for one in picks for name in one["picked"]}
        lines = [one.line for one in all_in(pool) if one.custom_id in names]
        replace_file(output, b"".join(map(json_line, lines)))
    raise typer.Exit(show_picks(picks, style))


def _chosen(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
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
        yield {"candidate_of": of, "picked": picked}


def _saved(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the choices that the page saved. Raises UsageError for a line that is not a choice."""
    for number, line in enumerate(read_lines(path), 1):
        of, picked = line.get("candidate_of"), line.get("picked")
        names = picked if isinstance(picked, list) else []
        is_picked = picked is None or isinstance(picked, list)
        if not isinstance(of, str) or not is_picked or not all(isinstance(n, str) for n in names):
            raise UsageError("this line is not a choice", where=f"{path}:{number}")
        yield {"candidate_of": of, "picked": picked}
