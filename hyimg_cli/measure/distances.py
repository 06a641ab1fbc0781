"""Measure distances of pairs, videos frame by frame; check limits and write records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError, MachineError, UsageError
from hyimg_cli.measure.pairs import IMAGE_SUFFIXES, Pair, is_video
from hyimg_cli.media.frames import read_frames
from hyimg_cli.media.images import read_image, size_of
from hyimg_cli.memory.available import available_bytes
from hyimg_cli.quality.metrics import Metric, Pixels, number_to_json
from hyimg_cli.settings.name_template import files_in_order
from hyimg_cli.spec.units import bytes_text

# The option that limits each metric: a minimum if higher is closer.
LIMITED_BY = {"psnr": "min_psnr", "ssim": "min_ssim", "lpips": "max_lpips", "max_abs": "max_abs"}


@dataclass(frozen=True)
class Measured:
    """A pair with the values of each metric: one for a picture, one per frame for a video.

    `notes`: what reading a picture changed (alpha composited, 16 bit reduced, first of N frames).
    """

    pair: Pair
    values: Mapping[str, Sequence[float]]
    notes: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        return len(next(iter(self.values.values())))


def measured(pairs: Sequence[Pair], metrics: Sequence[Metric]) -> Iterator[Measured]:
    """Yield each pair with its distances, in order.

    Before anything is measured, raises UsageError for pictures of two sizes, and SourceImageError
    for one that cannot be read; later UsageError if two videos differ in size or number of frames,
    or a file cannot be read. Raises MachineError before a picture that takes more memory than there
    is.
    """
    # Only headers are read.
    sizes = [(p.name, size_of(str(p.a)), size_of(str(p.b))) for p in pairs if p.kind == "image"]
    wrong = [f"{name} ({a} and {b})" for name, a, b in sizes if a != b]
    if wrong:
        what = f"{len(wrong)} of {len(pairs)} pairs differ in size: {'; '.join(wrong)}"
        hint = "distances are taken between pictures of one size; nothing is scaled to fit"
        raise UsageError(what, hint=hint, code="quality.size-mismatch")
    for pair in pairs:
        rows, notes = list[list[float]](), dict[str, None]()
        try:
            for a, b in zip_longest(_frames(pair.a), _frames(pair.b)):
                if not rows and a is not None:
                    _require_memory(a[0], metrics)
                if a is None or b is None:
                    what = f"the videos differ in length: one ends after {len(rows)} frames"
                    raise UsageError(what, hint="cut the longer one", code="eval.frame-count")
                rows.append([metric.measure(a[0], b[0]) for metric in metrics])
                notes |= dict.fromkeys((*a[1], *b[1]))
            if not rows:
                raise UsageError("no frames found", where=pair.a, code="eval.no-frames")
        except HyimgError as error:
            where = f"{pair.name} ({error.where})" if error.where else pair.name
            kind = MachineError if isinstance(error, MachineError) else UsageError
            raise kind(error.what, where=where, hint=error.hint, code=error.code) from None
        columns = zip(metrics, zip(*rows, strict=True), strict=True)
        yield Measured(pair, {metric.name: [*of] for metric, of in columns}, tuple(notes))


def _require_memory(picture: Pixels, metrics: Sequence[Metric]) -> None:
    """Raise MachineError if a metric needs more memory for such a picture than is free."""
    most = max(metrics, key=lambda metric: metric.pixel_bytes)
    height, width = picture.shape[:2]
    needed, free = most.pixel_bytes * height * width, available_bytes()
    if needed > free:
        what = f"{most.name} of {width}x{height} pixels takes about {bytes_text(needed)}"
        hint = "measure psnr or max_abs, or smaller pictures"
        raise MachineError(f"{what}; {bytes_text(free)} are free", hint=hint, code="machine.memory")


def _frames(path: Path) -> Iterator[tuple[Pixels, tuple[str, ...]]]:
    """Yield one picture, a video's frames, or a folder's in natural order; each with notes."""
    if is_video(path) and not path.is_dir():
        yield from ((pixels, ()) for pixels in read_frames(path))
        return
    files = files_in_order(path, "*") if path.is_dir() else [path]
    for file in files:
        if file == path or file.suffix.lower() in IMAGE_SUFFIXES:
            source = read_image(file)
            yield source.pixels, source.notes


def breaches(
    results: Iterable[Measured], metrics: Sequence[Metric], limits: Mapping[str, float]
) -> Iterator[str]:
    """Yield a sentence for each pair that breaks a limit, by its worst frame.

    `limits`: by metric, in dB, levels, at least 0 or at most 1. NaN breaks any limit.
    """
    limited = [(metric, limits[metric.name]) for metric in metrics if metric.name in limits]
    for one in results:
        for metric, limit in limited:
            value = metric.worst(one.values[metric.name])
            side = "below" if metric.higher_is_nearer else "above"
            if not (value >= limit if metric.higher_is_nearer else value <= limit):
                yield f"{one.pair.name}: {metric.name} {value:.4g} is {side} {limit:g}"


def to_record(one: Measured, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return a pair with its distances by name; for a video the mean and the extremes."""
    pair = one.pair
    record: dict[str, Any] = {
        "name": pair.name,
        "a": str(pair.a),
        "b": str(pair.b),
        "kind": pair.kind,
        "frames": one.frames,
    }
    for metric in metrics:
        values = one.values[metric.name]
        record[metric.name] = number_to_json(metric.mean(values))
        if pair.kind == "video":
            record[f"{metric.name}_max"] = number_to_json(max(values))
            record[f"{metric.name}_min"] = number_to_json(min(values))
    return record | ({"notes": list(one.notes)} if one.notes else {})


def summary(results: Sequence[Measured], metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the number of pairs, and the mean and the worst value of each metric."""
    entry: dict[str, Any] = {"pairs": len(results)}
    for metric in metrics:
        of_pairs = [one.values[metric.name] for one in results]
        mean = metric.mean(metric.mean(values) for values in of_pairs)
        worst = metric.worst(value for values in of_pairs for value in values)
        entry[metric.name] = {"mean": number_to_json(mean), "worst": number_to_json(worst)}
    return entry
