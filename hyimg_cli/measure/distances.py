"""Distances of pairs: pictures once, videos frame by frame."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from hyimg_cli.errors import HyimgError, UsageError
from hyimg_cli.measure.pairs import IMAGE_SUFFIXES, Pair, is_video
from hyimg_cli.media.frames import read_frames
from hyimg_cli.media.images import probe_image, read_image
from hyimg_cli.quality.metrics import Metric, Pixels

Frame = tuple[Pixels, tuple[str, ...]]


@dataclass(frozen=True)
class Measured:
    """A pair with what was found: by metric the value of each frame, of a picture just one.

    `notes`: what reading a picture changed (alpha composited, 16 bit reduced, first of N frames).
    """

    pair: Pair
    values: Mapping[str, Sequence[float]]
    notes: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        return len(next(iter(self.values.values())))


def measured(pairs: Sequence[Pair], metrics: Sequence[Metric]) -> Iterator[Measured]:
    """Each pair with its distances, in order.

    Raises UsageError for pictures of two sizes, before anything is measured; later on where two
    videos differ in size or number of frames, and for a file that cannot be read.
    """
    _require_same_sizes(pairs)
    for pair in pairs:
        try:
            yield _measured(pair, metrics)
        except HyimgError as error:
            where = f"{pair.name} ({error.where})" if error.where else pair.name
            raise UsageError(error.what, where=where, hint=error.hint, code=error.code) from None


def _measured(pair: Pair, metrics: Sequence[Metric]) -> Measured:
    values: dict[str, list[float]] = {metric.name: [] for metric in metrics}
    notes: dict[str, None] = {}
    count = 0
    for a, b in zip_longest(_frames(pair.a), _frames(pair.b)):
        if a is None or b is None:
            what = f"the videos differ in length: one ends after {count} frames"
            raise UsageError(what, hint="cut the longer one", code="eval.frame-count")
        for metric in metrics:
            values[metric.name].append(metric.measure(a[0], b[0]))
        notes |= dict.fromkeys((*a[1], *b[1]))
        count += 1
    if not count:
        raise UsageError("there are no frames", where=pair.a, code="eval.no-frames")
    return Measured(pair, values, tuple(notes))


def _frames(path: Path) -> Iterator[Frame]:
    """One picture, the frames of a video, or those in a folder, in the order of their names."""
    if is_video(path) and not path.is_dir():
        yield from ((pixels, ()) for pixels in read_frames(path))
        return
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file == path or file.suffix.lower() in IMAGE_SUFFIXES:
            source = read_image(file)
            yield source.pixels, source.notes


def _require_same_sizes(pairs: Sequence[Pair]) -> None:
    """Raise UsageError that names every pair of two sizes; headers alone are read."""
    sizes = [(p.name, _size(p.a), _size(p.b)) for p in pairs if p.kind == "image"]
    wrong = [f"{name} ({a} and {b})" for name, a, b in sizes if a != b]
    if wrong:
        count = f"{len(wrong)} of {len(pairs)} pairs differ in size"
        hint = "distances are taken between pictures of one size; nothing is scaled to fit"
        raise UsageError(f"{count}: {'; '.join(wrong)}", hint=hint, code="quality.size-mismatch")


def _size(path: Path) -> str:
    try:
        return str(probe_image(path, decode=False)[0])
    except HyimgError as error:
        raise UsageError(error.what, where=error.where, hint=error.hint, code=error.code) from None
