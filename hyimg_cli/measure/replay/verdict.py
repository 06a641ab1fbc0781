"""Compare a replay with its original: equal, or how far apart and possible reasons."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyimg_cli.errors import HyimgError
from hyimg_cli.measure.distances import measured
from hyimg_cli.measure.pairs import Pair
from hyimg_cli.measure.replay.records import Records
from hyimg_cli.measure.replay.run_folder import REDRAWS, frames_digest
from hyimg_cli.media.carried import own_picture
from hyimg_cli.media.frames import read_frames
from hyimg_cli.media.images import pixel_digest, read_image
from hyimg_cli.media.recorded import Described, Record
from hyimg_cli.quality.metrics import PIXEL_METRICS, number_to_json
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.job import ANSWER_SUFFIX

_PSNR, _MAX_ABS = PIXEL_METRICS["psnr"], PIXEL_METRICS["max_abs"]


@dataclass(frozen=True)
class ReplayVerdict:
    """Whether a replay is `equal` in what was `compared`, and the reasons if it is not.

    Reasons are differences in the records, or natural ones. `psnr` in dB and `max_abs` in levels
    are None if the two are equal, or cannot be measured: `not_measured` says why.
    """

    compared: str
    equal: bool
    psnr: float | None = None
    max_abs: float | None = None
    not_measured: str = ""
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"psnr": number_to_json(self.psnr)}


def compared_file(described: Described) -> Path | None:
    """Return the file to compare a replay with; None for a sidecar whose video is missing."""
    if described.kind != "sidecar":
        return described.path
    video = described.path.with_suffix(".mp4")
    return video if video.is_file() else None


def answer_to(
    original: Path, folder: Path, line: Mapping[str, Any], layer: int = 0
) -> tuple[Path, str]:
    """Return the file of a replay's `line` to compare with the original, and its pixel digest.

    The digest of an answer is empty. For a redraw, the replay's redraw; for a layer, the replay's
    `layer`; else the result.
    """
    for kind, suffix in REDRAWS.items():
        if original.name.endswith(suffix) and line.get("edit"):
            redraw = folder / line["edit"][kind]
            return redraw, pixel_digest(read_image(redraw).pixels)
    own = (one for one in line["outputs"] if one.get("layer", 0) == layer)
    output = next(own, line["outputs"][0])
    return folder / output["path"], str(output.get("pixel_sha256", ""))


def verdict(described: Described, original: Path, made: Path, pixel_sha256: str) -> ReplayVerdict:
    """Compare the replay `made`, whose result line has `pixel_sha256`, with the original.

    An answer is compared by its text.

    Raises SourceImageError if the original cannot be decoded.
    """
    record = Records().read(made).record
    assert described.record is not None, "the original was replayed from its record"
    assert record is not None, "a replay writes its record"
    compared, is_equal = _equality(original, described.record, made, pixel_sha256)
    if is_equal:
        return ReplayVerdict(compared, equal=True)
    reasons = tuple(_reasons(described.record, record))
    if described.kind == "answer":
        texts = f"{shown(described.record.answer)}, now {shown(record.answer)}"
        return ReplayVerdict(compared, equal=False, not_measured=texts, reasons=reasons)
    try:
        (apart,) = measured([Pair(original.name, original, made)], (_PSNR, _MAX_ABS))
    except HyimgError as error:  # other sizes, or other numbers of frames
        return ReplayVerdict(compared, equal=False, not_measured=error.what, reasons=reasons)
    psnr, max_abs = _PSNR.mean(apart.values["psnr"]), max(apart.values["max_abs"])
    return ReplayVerdict(compared, equal=False, psnr=psnr, max_abs=max_abs, reasons=reasons)


def _equality(original: Path, record: Record, made: Path, pixel_sha256: str) -> tuple[str, bool]:
    """Return what of the two can be compared, and whether it is equal."""
    if made.suffix == ANSWER_SUFFIX:
        return "characters", original.read_bytes() == made.read_bytes()
    if "quality" in record.job:  # a picture that lost something when it was written
        if record.pixel_sha256:
            return "pixels before compression", record.pixel_sha256 == pixel_sha256
        files = (pixel_digest(read_image(file).pixels) for file in (original, made))
        return "pixels as decoded", next(files) == next(files)
    if made.suffix != ".mp4":
        as_rgb, own = read_image(original).pixels, own_picture(original)[0]
        return "pixels", pixel_sha256 in (pixel_digest(as_rgb), pixel_digest(own))
    if recorded := frames_digest(original):
        return "frames before compression", recorded == pixel_sha256
    a, b = ([pixel_digest(frame) for frame in read_frames(film)] for film in (original, made))
    return "frames as decoded", a == b


def _reasons(original: Record, made: Record) -> Iterator[str]:
    """Yield the differences between the records of the two files."""
    if original.cot_text != made.cot_text:
        yield "the text before the picture is different"
    if original.size and original.size != made.size:
        yield f"size {original.size}, now {made.size}"
    if original.model_fingerprint != made.model_fingerprint:
        yield "the model is different"
    if original.source_sha256 and original.source_sha256 != made.source_sha256:
        yield "a source image is different"
    yield from _changes({"hyimg": original.version}, {"hyimg": made.version})
    yield from _changes(original.settings, made.settings)
    yield from _changes(original.packages, made.packages)
    if not original.settings:
        yield "device, dtype and packages of the original are not recorded"
    elif original.settings.get("device") == "cuda":
        yield "on a GPU another batch or kernel may round sums differently"


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *now)) if before else ():
        was, is_now = before.get(name, "by default"), now.get(name, "by default")
        if was != is_now:
            yield f"{name} {was}, now {is_now}"
