"""`hyimg merge`: join the folders of two clusters, or a bucket, into one."""

import shlex
from dataclasses import asdict
from pathlib import Path

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.journal.bucket import existing_run
from hyimg_cli.journal.journal import MISSING
from hyimg_cli.journal.merge import merge as merged_from
from hyimg_cli.spec.units import counted


def merge(
    folders: list[Path] = typer.Argument(
        metavar="OUT", help="Run folders: the -o of hyimg generate."
    ),
    into: Path = o.output(
        "Folder to merge into; its own results are kept.",
        default=...,
        parser=o.place,
    ),
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Merge run folders into one, and list missing jobs.

    Use it for runs of several clusters, or to download a run; shards of one run share a folder and
    need no merge.

    Copies result lines unchanged, and files once their sha256 is checked. A finished job replaces a
    failed one. A job that two folders made with different settings is an error. Jobs without a
    result are written to missing.jsonl, and the exit code is then 1.
    """
    for folder in folders:
        existing_run(folder)
    found, place = merged_from(folders, into), shown_place(into)
    if as_json:
        merged = found._asdict() | {"missing": len(found.missing), "edits": asdict(found.edits)}
        render.json_line({"merged": merged, "output_dir": place})
    tell = render.note_unless(quiet or as_json)
    counts = [f"{found.done:,} done", f"{found.failed:,} failed", f"{len(found.missing):,} missing"]
    said = ", ".join((*counts, *found.edits.remarks))
    tell(f"merged {counted(len(folders), 'folder')} into {place}: {said}")
    if found.damaged:
        what = f"{counted(len(found.damaged), 'finished job')} whose files are missing or changed"
        more = ", …" if len(found.damaged) > 3 else ""
        tell(f"{what}: {', '.join(found.damaged[:3])}{more}")
    if found.missing:
        again = ["hyimg", "generate", shown_place(into / MISSING), "-o", place]
        again += ["--retry-failed"] if found.failed else []
        tell(f"to run the missing jobs: {shlex.join(again)}")
    raise typer.Exit(1 if found.missing else 0)
