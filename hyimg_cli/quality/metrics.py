"""Distances between two pictures by pixel value: PSNR, SSIM, largest difference, shares.

Pixels are uint8 arrays [H, W, 3], RGB. A level is one of the 256 values of a channel; a share is a
fraction (0 to 1) of the H * W * 3 values.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyimg_cli.errors import UsageError

Pixels = NDArray[np.uint8]
# Values by metric name; a metric is missing if a picture is too small for it.
Distance = Mapping[str, float | None]
# A window of SSIM: 3.5 sigma to each side of its centre.
SSIM_WINDOW = 11


def psnr(a: Pixels, b: Pixels) -> float:
    """Return the peak signal-to-noise ratio in dB over all values, peak 255.

    `inf` for equal pictures.
    """
    require_same_size(a, b)
    return psnr_of_error(float(np.mean(np.subtract(a, b, dtype=np.float64) ** 2)))


def psnr_of_error(mean_squared_error: float) -> float:
    """Return the PSNR in dB of a mean squared error in levels squared; `inf` for 0."""
    return math.inf if mean_squared_error == 0 else 10 * math.log10(255**2 / mean_squared_error)


def error_of_psnr(psnr: float) -> float:
    """Return the mean squared error, in levels squared, of a PSNR."""
    return 255**2 / 10 ** (psnr / 10)


def ssim(a: Pixels, b: Pixels) -> float:
    """Return the structural similarity, the mean over the three channels; 1 for equal pictures.

    Gaussian window of sigma 1.5 and 11 x 11 values, population covariance, K 0.01 and 0.03. Raises
    UsageError if the sizes differ or a side is shorter than the window. Source: Wang et al. 2004,
    as in scikit-image's `structural_similarity`.
    """
    from skimage.metrics import structural_similarity

    require_same_size(a, b)
    require_side("SSIM", SSIM_WINDOW, a, hint="measure psnr")
    value = structural_similarity(
        a,
        b,
        channel_axis=2,
        data_range=255,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    return float(value)


def cosine(a: Pixels, b: Pixels) -> float:
    """Return the cosine of the angle between all values of two pictures; 1 for equal pictures.

    Values are never negative, so any two pictures have a high cosine: see PSNR.
    """
    require_same_size(a, b)
    x, y = (pixels.astype(np.float64).ravel() for pixels in (a, b))
    # For equal pictures, the root of a square: exactly 1.
    lengths = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / lengths if lengths else float(not x.any() and not y.any())


def max_abs(a: Pixels, b: Pixels) -> int:
    """Return the largest difference of a value, in levels."""
    return int(level_differences(a, b).max())


def share_within(a: Pixels, b: Pixels, levels: int) -> float:
    """Return the share of values that differ by at most `levels`; 0 counts equal values."""
    return float(np.mean(level_differences(a, b) <= levels))


def level_differences(a: Pixels, b: Pixels) -> Pixels:
    """Return |a - b| of each value, [H, W, 3]. Raises UsageError if the sizes differ."""
    require_same_size(a, b)
    return np.maximum(a, b) - np.minimum(a, b)


@dataclass(frozen=True)
class Metric:
    """One measure: name, unit, whether higher is closer, and the function that computes it.

    `min_side`: the shortest side that a picture may have. `pixel_bytes`: memory that it takes for
    each pixel of a picture.
    """

    name: str
    unit: str
    higher_is_nearer: bool
    measure: Callable[[Pixels, Pixels], float]
    min_side: int = 1
    pixel_bytes: int = 0

    def mean(self, values: Iterable[float]) -> float:
        """Return the mean over frames; for PSNR, that of the squared error.

        So one equal frame does not make it infinite (as ffmpeg's psnr filter reports it).
        """
        found = list(values)
        if self.name != "psnr":
            return math.fsum(found) / len(found)
        return psnr_of_error(math.fsum(map(error_of_psnr, found)) / len(found))

    def worst(self, values: Iterable[float]) -> float:
        """Return the value of the worst picture."""
        return min(values) if self.higher_is_nearer else max(values)


SHARES = {"equal_share": 0, "within_5": 5, "within_10": 10, "within_20": 20, "within_50": 50}
# Every metric that needs no weights, by name.
PIXEL_METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("psnr", "dB", True, psnr),
        Metric("ssim", "", True, ssim, SSIM_WINDOW, 150),
        Metric("cosine", "", True, cosine),
        Metric("max_abs", "levels", False, max_abs),
        *(
            Metric(name, "share", True, partial(share_within, levels=levels))
            for name, levels in SHARES.items()
        ),
    )
}


def distance(a: Pixels, b: Pixels, metrics: Iterable[Metric]) -> Distance:
    """Measure two pictures by these metrics. Raises UsageError if the sizes differ."""
    require_same_size(a, b)
    side = min(a.shape[:2])
    return {m.name: m.measure(a, b) if side >= m.min_side else None for m in metrics}


def require_same_size(a: Pixels, b: Pixels) -> None:
    """Raise UsageError if two pictures differ in size: nothing is scaled to fit."""
    assert a.dtype == b.dtype == np.uint8, "pixels are bytes"
    assert a.shape[2:] == b.shape[2:] == (3,), "pixels are RGB"
    if a.shape != b.shape:
        hint = "distances are taken between pictures of one size; nothing is scaled to fit"
        what = f"the pictures differ in size: {_size(a)} and {_size(b)}"
        raise UsageError(what, hint=hint, code="quality.size-mismatch")


def require_side(metric: str, least: int, picture: Pixels, *, hint: str) -> None:
    """Raise UsageError if a side is shorter than `least` pixels."""
    if min(picture.shape[:2]) < least:
        what = f"{metric} needs {least} pixels on each side; this is {_size(picture)}"
        raise UsageError(what, hint=hint, code="quality.too-small")


def number_to_json(value: Any) -> Any:
    """Return `value`; infinity becomes the text "inf", because JSON has no number for it."""
    return "inf" if value == math.inf else value


def _size(pixels: Pixels) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"
