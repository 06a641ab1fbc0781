"""Settings of jobs: what holds where a manifest line says nothing."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from annotated_types import Interval

from hyimg_cli.spec.declare import OUTSIDE, SAMPLING, option
from hyimg_cli.spec.job import SizeRequest
from hyimg_cli.spec.options import (
    JobOptions,
    KeepOutside,
    PictureOptions,
    TextSampling,
    VideoOptions,
)

_sampling = partial(option, in_line=True, pixels="job", panel=SAMPLING)


@dataclass(frozen=True, kw_only=True)
class _LineOptions:
    """What decides which jobs a line becomes."""

    size: SizeRequest = _sampling(SizeRequest(), "Of the result.", is_basic=True)
    n: int = _sampling(
        1,
        "Number of results of a line.",
        Interval(ge=1, le=1000),
        aliases=("num_outputs_per_prompt",),
    )
    vary: Literal["picture", "text", "both"] = _sampling(
        "both", "What the results of a line differ in, by their seeds.", only="pictures"
    )


@dataclass(frozen=True, kw_only=True)
class Sampling(VideoOptions, TextSampling, PictureOptions, JobOptions, _LineOptions):
    """How a job is sampled. None of what a checkpoint may say: as that says."""


@dataclass(frozen=True, kw_only=True)
class _Switch:
    """Whether an edit keeps its source outside."""

    __slots__ = ()

    keep_outside: bool = option(
        False,
        "Edits in their source's size, every pixel outside the edit equal to it.",
        panel=OUTSIDE,
        only="pictures",
        in_line=True,
        pixels="job",
    )


@dataclass(frozen=True, kw_only=True)
class Outside(KeepOutside, _Switch):
    """Whether and how an edit keeps its source outside."""
