"""Distances between two pictures by pixel value: PSNR, SSIM, largest difference, shares.

Pixels are uint8 arrays [H, W, 3], RGB. A level is one of the 256 values of a channel; a share is a
fraction (0 to 1) of the H * W * 3 values.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyimg_cli.errors import UsageError

Pixels = NDArray[np.uint8]
# A window of SSIM: 3.5 sigma to each side of its centre.
SSIM_WINDOW = 11


@dataclass(frozen=True)
class Distance:
    """Everything that is measured between two pictures.

    `psnr` in dB, higher is nearer, infinite where they are equal; `ssim` at most 1, None where a
    side is shorter than its window; `lpips` 0 or more, lower is nearer, None where it was not
    asked for; `max_abs` in levels; `within_N`: share of the values that differ by N levels or less.
    """

    psnr: float
    ssim: float | None
    max_abs: int
    equal_share: float
    within_5: float
    within_10: float
    within_20: float
    within_50: float
    lpips: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name; an infinite PSNR is the text "inf", which JSON has no number for."""
        return {name: number_to_json(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Distance":
        """What `to_json` was made of; keys of others beside it are passed over."""
        known = {field.name for field in fields(cls)} & entry.keys()
        return cls(**{name: number_from_json(entry[name]) for name in known})


def distance(a: Pixels, b: Pixels) -> Distance:
    """Everything but LPIPS, which needs weights. Raises UsageError where the sizes differ."""
    require_same_size(a, b)
    levels = _levels(a, b)
    is_wide_enough = min(a.shape[:2]) >= SSIM_WINDOW
    return Distance(
        psnr=psnr(a, b),
        ssim=ssim(a, b) if is_wide_enough else None,
        max_abs=int(levels.max()),
        equal_share=_share(levels, 0),
        within_5=_share(levels, 5),
        within_10=_share(levels, 10),
        within_20=_share(levels, 20),
        within_50=_share(levels, 50),
    )


def psnr(a: Pixels, b: Pixels) -> float:
    """Peak signal-to-noise ratio in dB over all values, peak 255; `inf` for equal pictures."""
    from skimage.metrics import mean_squared_error

    require_same_size(a, b)
    return psnr_of_error(float(mean_squared_error(a, b)))


def psnr_of_error(mean_squared_error: float) -> float:
    """PSNR in dB of a mean squared error in levels squared; `inf` for 0."""
    return math.inf if mean_squared_error == 0 else 10 * math.log10(255**2 / mean_squared_error)


def error_of_psnr(psnr: float) -> float:
    """The mean squared error, in levels squared, that has this PSNR."""
    return 255**2 / 10 ** (psnr / 10)


def ssim(a: Pixels, b: Pixels) -> float:
    """Structural similarity, the mean over the three channels; 1 for equal pictures.

    Gaussian window of sigma 1.5 and 11 x 11 values, population covariance, K 0.01 and 0.03.
    Raises UsageError where the sizes differ or a side is shorter than the window.
    Source: Wang et al. 2004, as in scikit-image's `structural_similarity`.
    """
    from skimage.metrics import structural_similarity

    require_same_size(a, b)
    if min(a.shape[:2]) < SSIM_WINDOW:
        what = f"SSIM needs {SSIM_WINDOW} pixels on each side; this is {_size(a)}"
        raise UsageError(what, hint="measure psnr", code="quality.too-small")
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


def max_abs(a: Pixels, b: Pixels) -> int:
    """The largest difference of a value, in levels."""
    require_same_size(a, b)
    return int(_levels(a, b).max())


def share_within(a: Pixels, b: Pixels, levels: int) -> float:
    """Share of the values that differ by `levels` or less; 0 asks for exact equality."""
    require_same_size(a, b)
    return _share(_levels(a, b), levels)


def level_differences(a: Pixels, b: Pixels) -> Pixels:
    """|a - b| of each value, [H, W, 3]. Raises UsageError where the sizes differ."""
    require_same_size(a, b)
    return _levels(a, b)


def require_same_size(a: Pixels, b: Pixels) -> None:
    """Raises UsageError where two pictures differ in size: nothing is scaled to fit."""
    assert a.dtype == b.dtype == np.uint8, "pixels are bytes"
    assert a.shape[2:] == b.shape[2:] == (3,), "pixels are RGB"
    if a.shape != b.shape:
        hint = "distances are taken between pictures of one size; nothing is scaled to fit"
        what = f"the pictures differ in size: {_size(a)} and {_size(b)}"
        raise UsageError(what, hint=hint, code="quality.size-mismatch")


def number_to_json(value: float | None) -> float | str | None:
    """`value`, infinity as the text "inf"."""
    return "inf" if value == math.inf else value


def number_from_json(value: Any) -> Any:
    """What `number_to_json` was given."""
    return math.inf if value == "inf" else value


def _levels(a: Pixels, b: Pixels) -> Pixels:
    return np.maximum(a, b) - np.minimum(a, b)


def _share(levels: Pixels, most: int) -> float:
    return float(np.count_nonzero(levels <= most) / levels.size)


def _size(pixels: Pixels) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"
