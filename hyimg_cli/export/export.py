"""Make a dataset of runs: pictures, licences, rows, shards, in this order."""

from collections import Counter
from functools import partial

from hyimg_cli import __version__
from hyimg_cli.errors import UsageError, require
from hyimg_cli.export.card import write_card
from hyimg_cli.export.columns import PREFERENCE, as_utf8
from hyimg_cli.export.dataset import Info, plan_shards, write_dataset
from hyimg_cli.export.finished import find_finished
from hyimg_cli.export.licences import licences_of, refuse_forbidden
from hyimg_cli.export.rows import ExportRequest, count_reasons, plan_rows


def export_runs(request: ExportRequest) -> tuple[Info, dict[str, str]]:
    """Write a dataset, and return the contents of its dataset.json and the pictures left out.

    Left out are pictures whose files are missing or changed, with the reason. Raises UsageError if
    a licence forbids it, or nothing has a row.
    """
    require("yaml", *(["pyarrow"] if request.form == "parquet" else []), extra="export")
    found = find_finished(request.runs, request.select)
    licences = licences_of(found.finished)
    needed = refuse_forbidden(licences, request.allowed_licences)
    planned = plan_rows(found.finished, licences, request)
    if not planned.rows:
        why = [*planned.damaged.values(), *count_reasons(planned.rejected), *found.left_out]
        raise UsageError(
            f"no picture or answer was accepted{': ' if why else ''}{', '.join(why[:3])}",
            hint="hyimg pick lists what it accepts; hyimg report shows the run",
            code="export.nothing",
        )
    shards = plan_shards(planned.rows, request.form, request.shards)
    sources = Counter(
        row.columns["licences"]["sources"] or "unknown"
        for row in planned.rows
        if row.columns["source_sha256"] and row.config != PREFERENCE
    )
    facts: Info = {
        "hyimg": __version__,
        "format": request.form,
        "split": request.split,
        "sources": "by-hash" if request.sources_by_hash else "files",
        "rules": found.rules,
        "scorers": found.scorers,
        "licences": {"models": licences, "allowed": needed, "sources": sources},
        "rejected": count_reasons(planned.rejected),
        "left_out": found.left_out
        + Counter({"its files are missing or changed": len(planned.damaged)}),
    }
    card_of = partial(write_card, shards=shards)
    info = write_dataset(
        request.folder, shards, planned.rejected, as_utf8(facts), card_of, force=request.force
    )
    return info, planned.damaged
