"""Show picks, one line per manifest line, with reasons; find the run or texts they are from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.cli.progress import Report, stoppable
from hyimg_cli.cli.render import Style
from hyimg_cli.engine.runner import RunRequest
from hyimg_cli.journal.journal import PAGE
from hyimg_cli.journal.picks import DRAFTS, kind_of
from hyimg_cli.pipelines.failures import exit_code
from hyimg_cli.spec.printed import printable
from hyimg_cli.spec.units import counted

RUN_OR_TEXTS = typer.Argument(
    metavar="RUN",
    parser=o.finished_run,
    help="Output folder of hyimg generate, or a file that hyimg think wrote.",
)
_MOST_SHOWN = 20


def show_picks(picks: Sequence[Mapping[str, Any]], *, is_quiet: bool, as_json: bool) -> int:
    """Report the picks and the reasons for rejections, and return the exit code.

    It is 1 if a line has no accepted candidate.
    """
    tell = render.note_unless(is_quiet)
    poor = [one for one in picks if not set(one["picked"]) - set(one["missing"])]
    for one in picks[:_MOST_SHOWN]:
        picked, missing = ", ".join(one["picked"]) or "none", one["missing"]
        by = " by a person" if one["chosen_by"] == "person" else ""
        waits = f"; not drawn in full yet: {', '.join(missing)}" if missing else ""
        tell(f"{one['candidate_of']}: {picked} picked{by}{waits}{_values(one)}")
    if len(picks) > _MOST_SHOWN:
        tell(f"{len(picks) - _MOST_SHOWN} more in picks.jsonl")
    reasons = Counter(kind_of(entry["reasons"][0]) for one in picks for entry in one["rejected"])
    rejected = ", ".join(
        f"{printable(reason)}: {count}" for reason, count in reasons.most_common(5)
    )
    said = f"{counted(len(picks), 'line')}, {len(picks) - len(poor)} with an accepted candidate"
    tell(f"{said}; rejected: {rejected or 'none'}")
    unjudged = Counter(
        name for one in picks for entry in one["ranking"] for name in entry.get("not_judged_by", ())
    )
    for name, count in unjudged.items():
        tell(
            f"{counted(count, 'candidate')} passed without a judgement by {name}: no source picture"
        )
    for name in picks[0]["rule"].get("left_out", ()) if picks else ():
        tell(f"{name} has no value in this run, so it does not count; hyimg score shows why")
    if any(one["missing"] for one in picks):
        tell("run the hyimg generate command of this run again to draw them in full")
    for one in picks if as_json else ():
        render.json_line(one)
    return 1 if poor else 0


def show_best_of(request: RunRequest, style: Style, *, again: str) -> int:
    """Draw, score and pick candidates (`hyimg generate … --score …`); return the exit code."""
    from hyimg_cli.scoring.best_of import BestOf

    place = str(request.config.output.folder)
    report = Report(style, place=place, again=again, retry=f"{again} --retry-failed")
    flow = BestOf(request, report.show)
    with stoppable(flow.request_stop):
        picks = flow.run()
    if request.config.output.report:
        refresh_pages(request.config.output.folder)
    code = show_picks(picks, is_quiet=style.is_quiet, as_json=style.as_json)
    page = request.config.output.folder / DRAFTS / PAGE
    if page.is_file():
        render.note_unless(style.is_quiet)(f"to choose among the drafts yourself: {page}")
    return exit_code(*(one.failed + one.invalid for one in flow.summaries)) or code


def show_found_regions(request: RunRequest, style: Style, *, again: str) -> int:
    """Draw drafts that find regions, then the regions; return the exit code."""
    from hyimg_cli.scoring.found_regions import REGIONS, FoundRegions

    out, retry = request.config.output.folder, f"{again} --retry-failed"
    edits, drafts = (
        Report(style, place=str(place), again=again, retry=retry) for place in (out, out / REGIONS)
    )
    flow = FoundRegions(request, edits.show, drafts.show)
    with stoppable(flow.request_stop):
        flow.run()
    last = flow.summaries[-1]
    return exit_code(last.failed, last.invalid, last.gated)


def refresh_pages(place: Path) -> None:
    """Show the picks on the report pages of a run and of its drafts."""
    from hyimg_cli.report.run_page import RunPage

    for folder in (place, place / DRAFTS):
        if (folder / PAGE).is_file():
            RunPage(folder).refresh()


def _values(line: Mapping[str, Any]) -> str:
    """Return the values of the first picked candidate."""
    first = next((one for one in line["ranking"] if one["custom_id"] in line["picked"]), None)
    values = (first or {}).get("final_values") or (first or {}).get("values") or {}
    found = ", ".join(f"{name} {value:g}" for name, value in values.items() if "." not in name)
    return f" ({found})" if found else ""
