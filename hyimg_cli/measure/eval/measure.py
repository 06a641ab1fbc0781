"""Distances of pairs: pictures once, videos frame by frame, told as mean, max and min."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.measure.eval.pairs import IMAGE_SUFFIXES, Pair, is_video
from hyimg_cli.media.frames import read_frames
from hyimg_cli.media.images import probe_image, read_image
from hyimg_cli.quality import metrics
from hyimg_cli.quality.metrics import Pixels

Measure = Callable[[Pixels, Pixels], float]

# What each word of the command line measures.
MEASURED_BY: Mapping[str, tuple[str, ...]] = {
    "lpips": ("lpips",),
    "psnr": ("psnr",),
    "ssim": ("ssim",),
    "all": (
        "psnr",
        "ssim",
        "lpips",
        "max_abs",
        "equal_share",
        "within_5",
        "within_10",
        "within_20",
        "within_50",
    ),
}


@dataclass(frozen=True)
class Metric:
    """One measure: its name and unit, whether higher is nearer, and how a mean is taken of it."""

    name: str
    unit: str
    higher_is_nearer: bool
    measure: Measure

    def mean(self, values: Sequence[float]) -> float:
        """The mean over frames; of PSNR that of the squared error, so that one equal frame does
        not make it infinite (as ffmpeg's psnr filter reports it).
        """
        if self.name != "psnr":
            return math.fsum(values) / len(values)
        errors = [metrics.error_of_psnr(value) for value in values]
        return metrics.psnr_of_error(math.fsum(errors) / len(errors))


@dataclass(frozen=True)
class Spread:
    """One metric over the frames of a pair; the three are equal for a picture."""

    mean: float
    max: float
    min: float


@dataclass(frozen=True)
class Measured:
    """A pair with what was found: a spread for each metric, in the order they were asked for.

    `notes`: what reading a picture changed (alpha composited, 16 bit reduced, first of N frames).
    """

    pair: Pair
    frames: int
    values: Mapping[str, Spread]
    notes: tuple[str, ...] = ()


def chosen_metrics(names: Iterable[str], lpips: Measure | None) -> tuple[Metric, ...]:
    """The metrics of these names, each once; `lpips` is the distance of a loaded metric."""
    known = pixel_metrics()
    if lpips is not None:
        known["lpips"] = lpips_metric(lpips)
    return tuple(known[name] for name in dict.fromkeys(names))


def pixel_metrics() -> dict[str, Metric]:
    """Every metric that needs no weights, by name."""
    within = [
        ("equal_share", 0),
        ("within_5", 5),
        ("within_10", 10),
        ("within_20", 20),
        ("within_50", 50),
    ]
    found = [
        Metric("psnr", "dB", True, metrics.psnr),
        Metric("ssim", "", True, metrics.ssim),
        Metric("max_abs", "levels", False, metrics.max_abs),
        *(Metric(name, "share", True, _share_within(levels)) for name, levels in within),
    ]
    return {metric.name: metric for metric in found}


def lpips_metric(distance: Measure) -> Metric:
    """LPIPS as a metric; `distance` is that of a loaded `quality.lpips.Lpips`."""
    return Metric("lpips", "", False, distance)


def measured(pairs: Sequence[Pair], chosen: Sequence[Metric]) -> Iterator[Measured]:
    """Each pair with its distances, in order.

    Raises UsageError for pictures of two sizes, before anything is measured; later on where two
    videos differ in size or number of frames, and for a file that cannot be read.
    """
    _require_same_sizes(pairs)
    for pair in pairs:
        try:
            yield _measured(pair, chosen)
        except HyimgError as error:
            where = f"{pair.name} ({error.where})" if error.where else pair.name
            raise UsageError(error.what, where=where, hint=error.hint, code=error.code) from None


def _measured(pair: Pair, chosen: Sequence[Metric]) -> Measured:
    found: list[list[float]] = []
    notes: dict[str, None] = {}
    for a, b in zip_longest(_frames(pair.a), _frames(pair.b)):
        if a is None or b is None:
            what = f"the videos differ in length: one ends after {len(found)} frames"
            raise UsageError(what, hint="cut the longer one", code="eval.frame-count")
        found.append([metric.measure(a.pixels, b.pixels) for metric in chosen])
        notes.update(dict.fromkeys((*a.notes, *b.notes)))
    if not found:
        raise UsageError("there are no frames", where=str(pair.a), code="eval.no-frames")
    columns = zip(chosen, zip(*found, strict=True), strict=True)
    return Measured(
        pair,
        len(found),
        {metric.name: Spread(metric.mean(v), max(v), min(v)) for metric, v in columns},
        tuple(notes),
    )


@dataclass(frozen=True)
class _Frame:
    pixels: Pixels
    notes: tuple[str, ...] = ()


def _frames(path: Path) -> Iterator[_Frame]:
    """One picture, the frames of a video, or those in a folder, in the order of their names."""
    if path.is_dir():
        files = (file for file in sorted(path.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES)
        yield from map(_picture, files)
    elif is_video(path):
        yield from map(_Frame, read_frames(path))
    else:
        yield _picture(path)


def _picture(path: Path) -> _Frame:
    source = read_image(path)
    return _Frame(source.pixels, source.notes)


def _share_within(levels: int) -> Measure:
    return lambda a, b: metrics.share_within(a, b, levels)


def _require_same_sizes(pairs: Sequence[Pair]) -> None:
    """Looks at the headers of all pictures; every pair of two sizes is named."""
    wrong = [text for pair in pairs if pair.kind == "image" and (text := _size_fault(pair))]
    if wrong:
        count = f"{len(wrong)} of {len(pairs)} pairs differ in size"
        hint = "distances are taken between pictures of one size; nothing is scaled to fit"
        raise UsageError(f"{count}: {'; '.join(wrong)}", hint=hint, code="quality.size-mismatch")


def _size_fault(pair: Pair) -> str:
    a, b = (_size(path) for path in (pair.a, pair.b))
    return "" if a == b else f"{pair.name} ({a} and {b})"


def _size(path: Path) -> str:
    try:
        return str(probe_image(path, decode=False)[0])
    except HyimgError as error:
        raise UsageError(error.what, where=error.where, hint=error.hint, code=error.code) from None
