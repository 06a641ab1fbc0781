"""Options of the commands that start from a finished file: `info` and `replay`."""

from pathlib import Path
from typing import Annotated

import typer

from hyimg_cli.cli.options import option, output
from hyimg_cli.spec.declare import MODEL

_REPLAY = "What is replayed"

DescribedFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE", help="PNG, JPEG, WebP and MP4 files, or the .json beside an MP4."
    ),
]
ReplayedFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A picture or MP4 that hyimg wrote, or a video's .json."),
]
ReplayDir = Annotated[
    Path | None,
    output("--output-dir", "Result folder. Default: runs/replay-<id>."),
]
ImagesFrom = Annotated[
    Path | None,
    option(
        "--images-from",
        panel=_REPLAY,
        help="Folder of the files that it was made from. Default: beside FILE, then where its run "
        "found them.",
    ),
]
AllowChanged = Annotated[
    bool,
    option(
        "--allow-changed",
        panel=_REPLAY,
        help="Run although the model or a source image is not the recorded one.",
    ),
]
ExpectEqual = Annotated[
    bool, option("--expect-equal", panel=_REPLAY, help="Exit code 1 where pixels are not equal.")
]
RecordedModel = Annotated[
    str | None,
    option("--model", panel=MODEL, help="Folder or hub id of the recorded model."),
]
