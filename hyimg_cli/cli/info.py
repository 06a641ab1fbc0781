"""`hyimg info`: show the records in finished files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from hyimg_cli.addresses import shown_place
from hyimg_cli.cli import options as o
from hyimg_cli.cli import render
from hyimg_cli.errors import HyimgError
from hyimg_cli.media.recorded import Described, read_described


def info(
    files: list[Path] = typer.Argument(
        metavar="FILE", help="PNG, JPEG, WebP or MP4 files, or the .json next to an MP4."
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Show how a picture or video was made: prompt, seed, model and versions.

    Reads every file; the exit code is that of the first one without a record.
    """
    faults: list[HyimgError] = []
    for path in files:
        try:
            described = read_described(path)
            if as_json:
                render.json_line(_as_json(described))
            else:
                for text in _lines(described):
                    render.line(text)
        except HyimgError as error:
            faults.append(error)
            render.error(error)
    raise typer.Exit(faults[0].exit_code if faults else 0)


def _as_json(described: Described) -> dict[str, Any]:
    facts: dict[str, Any] = {"file": shown_place(described.path), "kind": described.kind}
    if described.record is not None:
        facts["record"] = described.record.model_dump(exclude_unset=True)
    said = {"parameters": described.parameters, "digital_source_type": described.source_type}
    return facts | {name: text for name, text in said.items() if text}


def _lines(described: Described) -> Iterator[str]:
    file = shown_place(described.path)
    if described.record is not None:
        record = described.record
        yield f"{file}: made by hyimg {record.version}"
        # The fields that users most often look for.
        first = {name: record.job[name] for name in ("prompt", "seed") if name in record.job}
        for name, value in (first | record.job).items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name}: {shown}"
        if record.size and record.size != record.job.get("size"):
            yield f"  made in size: {record.size}"
        if record.cot_text:
            yield f"  text before the picture: {record.cot_text}"
        for number, digest in enumerate(record.source_sha256, 1):
            yield f"  sha256 of source image {number}: {digest}"
        yield f"  sha256 of the model: {record.model_fingerprint}"
        made = {"made with": record.settings, "by": record.packages}
        for title, values in made.items():
            if values:
                yield f"  {title}: {', '.join(f'{name} {value}' for name, value in values.items())}"
    else:
        its = "; its parameters:" if described.parameters else ""
        yield f"{file}: not made by hyimg{its}"
        for line in described.parameters.splitlines():
            yield f"  {line}"
    if described.source_type:
        yield f"  digital source type: {described.source_type}"
