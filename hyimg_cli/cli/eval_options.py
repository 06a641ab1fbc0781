"""Options of `eval`: the two sides, how they are compared, and gates."""

from pathlib import Path
from typing import Annotated

import typer

from hyimg_cli.cli.completion import among
from hyimg_cli.cli.options import STYLE, option
from hyimg_cli.quality.backbones import NETS

_COMPARE, _GATE = "What is compared", "Gates (exit code 1)"
METRICS = ("lpips", "psnr", "ssim", "all", "outside")
MetricChoice = Annotated[
    str,
    typer.Argument(
        metavar="|".join(METRICS),
        autocompletion=among(METRICS),
        help="What to measure; outside: what an edit, B, changed of its source, A.",
    ),
]
SideA = Annotated[
    Path | None,
    typer.Argument(
        metavar="A",
        show_default=False,
        help="A picture, a video, a folder of them, a run of hyimg generate, or alone a .jsonl "
        'file with {"a": …, "b": …} on each line. Without A and B: the newest bench folder here.',
    ),
]
SideB = Annotated[
    Path | None, typer.Argument(metavar="B", show_default=False, help="The same of the other.")
]
Net = Annotated[
    str,
    option(
        "--net",
        panel=_COMPARE,
        autocompletion=among(NETS),
        help="LPIPS: alex (default), squeeze, vgg.",
    ),
]
WeightsFile = Annotated[
    Path | None,
    option(
        "--weights",
        panel=_COMPARE,
        help="LPIPS: the backbone, such as torchvision's alexnet-owt-7be5be79.pth.",
    ),
]
AllowUnpaired = Annotated[
    bool,
    option("--allow-unpaired", panel=_COMPARE, help="Leave out what has no counterpart."),
]
AsVideo = Annotated[
    bool, option("--as-video", panel=_COMPARE, help="A and B are folders of one video's frames.")
]
SelfTest = Annotated[
    bool, option("--self-test", panel=_COMPARE, help="LPIPS: measure pairs of known distance.")
]
MinPsnr = Annotated[
    float | None,
    option("--min-psnr", panel=_GATE, help="dB that every picture and frame must reach."),
]
MinSsim = Annotated[
    float | None,
    option("--min-ssim", panel=_GATE, help="SSIM that every picture and frame must reach."),
]
MaxLpips = Annotated[
    float | None,
    option("--max-lpips", panel=_GATE, help="LPIPS that no picture or frame may exceed."),
]
MaxAbs = Annotated[
    int | None, option("--max-abs", panel=_GATE, help="Levels (0-255) that no value may exceed.")
]
CsvFile = Annotated[
    Path | None, option("--csv", panel=STYLE, help="Write the distances to this file too.")
]
