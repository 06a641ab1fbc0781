"""`hyimg eval scores`: the paired comparison of two scored runs, or the mean of one."""

from collections.abc import Sequence
from pathlib import Path

from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.files import replace_file
from hyimg_cli.journal.disk import disk_errors

# Pairs of pictures that a page shows for each scorer.
_MOST_PAIRS = 12


def show_scores(
    a: Path | None,
    b: Path | None,
    by: Sequence[str],
    page: Path | None,
    *,
    allow_unpaired: bool,
    as_json: bool,
) -> int:
    """Show each scorer's comparison; return 1 if a score is missing or a judge changed."""
    from hyimg_cli.measure.scores.comparison import (
        is_clean,
        largest_differences,
        lines,
        one_run,
        two_runs,
    )
    from hyimg_cli.measure.scores.scored_runs import read_scored_run, scorers_in

    if a is None:
        hint = "hyimg eval scores RUN, or hyimg eval scores A B"
        raise UsageError("scores are those of a scored run", hint=hint)
    if page is not None and b is None:
        raise UsageError("a page needs two runs", hint="hyimg eval scores A B --page PAGE")
    places = [a] if b is None else [a, b]
    known = [scorers_in(place) for place in places]
    names = [name for text in by for name in text.split(",")]
    names = names or [name for name in known[0] if all(name in some for some in known)]
    if not names:
        what = f"the runs share no scorer: {', '.join(known[0])} and {', '.join(known[-1])}"
        hint = "score both by the same scorer"
        raise UsageError(what, where=places[-1], hint=hint, code="eval.scores")
    records, sections = [], []
    for name in names:
        runs = [read_scored_run(place, name) for place in places]
        if b is None:
            record = one_run(runs[0])
        else:
            record = two_runs(runs[0], runs[1], allow_unpaired=allow_unpaired)
        records.append(record)
        said = [*lines(record)]
        for text in () if as_json else said:
            render.line(text)
        if as_json:
            render.json_line(record)
        if page is not None:
            pairs = largest_differences(runs[0], runs[1], _MOST_PAIRS)
            sections.append({"record": record, "lines": said, "pairs": pairs})
    if page is not None:
        from hyimg_cli.report.scores_page import scores_page

        with disk_errors(page.parent):
            replace_file(page, scores_page(sections).encode("utf-8", "backslashreplace"))
        render.note(f"page: {page}")
    return 0 if all(map(is_clean, records)) else 1
