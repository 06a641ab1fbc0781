"""`hyimg export`: make a training set of accepted pictures, with licences and a hash to verify."""

import shlex
from functools import partial
from pathlib import Path

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import UsageError
from hyimg_cli.spec.units import bytes_text, counted

_choice = partial(o.option, show_default=True)
FORMATS, SOURCES = ("parquet", "webdataset", "folder"), ("files", "by-hash")


def export(
    folders: list[Path] = typer.Argument(
        metavar="RUN",
        help="Folders of runs: the -o of hyimg generate. With --verify, a dataset.",
    ),
    output: Path | None = o.output("Folder to write the dataset to."),
    form: str = _choice(
        "Dataset format: parquet, webdataset or folder.",
        "--format",
        default="parquet",
        metavar="<name>",
    ),
    rejected: bool = o.switch(
        "Add preference pairs: accepted and rejected pictures.", "--rejected"
    ),
    split: str = _choice(
        "Split by source picture: 98/2 makes train and test.", default="100", metavar="<shares>"
    ),
    select: list[str] | None = o.SELECT_RESULTS,
    shards: int | None = o.option("Files per split. Default: 64 MB of pictures each.", min=1),
    source_licence: str | None = o.option(
        "Licence of source pictures whose lines' metadata names none.", metavar="<name>"
    ),
    sources: str = _choice(
        "Copy source pictures (files), or keep only their digests (by-hash).",
        default="files",
        metavar="<how>",
    ),
    allow_licence: list[str] | None = o.option(
        "Accept a licence that is refused, and record it in the card. Repeatable.",
        metavar="<name>",
    ),
    verify: bool = o.switch("Compute a dataset's hash again, and list what differs.", "--verify"),
    force: bool = o.switch("Replace another dataset.", "--force"),
    as_json: bool = o.AS_JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Make a training set of the accepted pictures of runs: Parquet, WebDataset or a folder.

    hyimg export out -o dataset --split 98/2 --source-licence CC-BY-4.0

    A run without picks (hyimg pick) exports every finished picture. Run the same command again
    after a kill: it resumes. Exit code 1: files of the runs are missing or changed, and their rows
    are left out; or --verify found a difference. Exit code 2: a licence does not permit it.
    """
    if verify:
        _verify(folders, as_json, quiet)
    if form not in FORMATS or sources not in SOURCES:
        given, allowed = (form, FORMATS) if form not in FORMATS else (sources, SOURCES)
        raise UsageError(f"{given!r} is not known", hint=f"allowed: {', '.join(allowed)}")
    if output is None:
        # The last of several words is usually meant as the folder.
        *runs, last = folders
        words = [*(runs or [last]), "-o", last if runs else "dataset"]
        again = shlex.join(["hyimg", "export", *map(str, words)])
        raise UsageError("no folder to write to is given", hint=f"name it with -o: {again}")
    # Imported here: help pages do not need it.
    from hyimg_cli.export.export import export_runs
    from hyimg_cli.export.rows import ExportRequest

    request = ExportRequest(
        folders,
        output,
        form,
        split,
        rejected,
        source_licence,
        sources == "by-hash",
        shards,
        tuple(allow_licence or ()),
        force,
        tuple(select or ()),
    )
    info, damaged = export_runs(request)
    if as_json:
        render.json_line({"dataset": info, "damaged": damaged, "output_dir": str(output)})
    elif not quiet:
        for name, why in list(damaged.items())[: render.PLACES]:
            render.note(f"left out {name}: {why}")
        for title in ("left_out", "rejected"):
            counts = [f"{why} ({n})" for why, n in info[title].items()]
            if counts:
                render.note(f"{title.replace('_', ' ')}: {', '.join(counts)}")
        rows = ", ".join(f"{name} {count}" for name, count in info["counts"].items())
        nbytes = sum(file.get("nbytes", 0) for file in info["files"].values())
        render.note(
            f"{counted(sum(info['counts'].values()), 'row')} ({rows}) in {shown_place(output)}: "
            f"{form}, {bytes_text(nbytes)}"
        )
        render.note(f"dataset hash: {info['dataset_sha256']}")
    raise typer.Exit(1 if damaged else 0)


def _verify(folders: list[Path], as_json: bool, quiet: bool) -> None:
    """Report differences in a dataset and exit."""
    if len(folders) != 1:
        raise UsageError("--verify takes one dataset", hint="hyimg export --verify DATASET")
    from hyimg_cli.export.verify import verify

    found = verify(folders[0])
    if as_json:
        render.json_line(found._asdict())
    else:
        for difference in found.differences:
            render.note(difference)
        if not quiet and not found.differences:
            rows = counted(found.rows, "row")
            render.note(f"equal: {rows}, dataset hash {found.dataset_sha256}")
    raise typer.Exit(1 if found.differences else 0)
