"""Decide what a redraw changed: a part, all but a part (background), none or all (global)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyimg_cli.finishing.planes import Mask, Pixels, Plane, blurred, opponent, scale_of

# `local` and `background` keep the source outside the edit. The edit of a `background` is most of
# the picture, or most of its border: all except a subject.
Kind = Literal["local", "background", "none", "global"]
_MOST_DRIFT, _MOST_NOISE, _MOST_AREA, _MOST_RIM = 9.0, 5.0, 0.55, 0.6
# Below this correlation, less than half of the power outside comes from the source; below the
# second value, a redraw may have a style of its own.
_LEAST_STRUCTURE, _SURE_STRUCTURE = 0.7, 0.9
_FLAT, _CHROMA, _LEAST_CHROMA = 1.0, (0.6, 1.5), 6.0
_MOST_REGIONS = 30
# Rows that are compared at a time, and pixels among them whose distances are measured.
_STRIP, _SAMPLE = 256, 20_000


@dataclass(frozen=True)
class Measures:
    """Measures of a redraw; None for one that cannot be taken.

    Mean difference removed with the drift, noise, fractions of the area and of the rim in the mask,
    number of regions, similarity of the structure outside, remaining colourfulness.
    """

    drift: float
    noise: float
    area: float
    rim: float
    regions: int
    structure: float | None
    chroma: float | None
    moved: bool

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why the whole picture counts as changed, each with its value; may be empty."""
        return tuple(self._reasons())

    @property
    def is_sure(self) -> bool:
        """Return False if the whole picture may have changed by less than `reasons` detects."""
        return self.structure is None or self.structure >= _SURE_STRUCTURE

    def _reasons(self) -> Iterator[str]:
        most = {
            "drift": (self.drift, _MOST_DRIFT),
            "noise": (self.noise, _MOST_NOISE),
            "area": (self.area, _MOST_AREA),
            "border": (self.rim, _MOST_RIM),
            "regions": (self.regions, _MOST_REGIONS),
        }
        for name, (value, limit) in most.items():
            if value > limit:
                yield f"{name} {_shown(value)} > {_shown(limit)}"
        if self.structure is not None and self.structure < _LEAST_STRUCTURE:
            yield f"structure {_shown(self.structure)} < {_shown(_LEAST_STRUCTURE)}"
        low, high = _CHROMA
        if self.chroma is not None and not low <= self.chroma <= high:
            beyond = f"< {low}" if self.chroma < low else f"> {high}"
            yield f"chroma {_shown(self.chroma)} {beyond}"
        if self.moved:
            yield "moved: the picture was zoomed or shifted"


@dataclass
class Change:
    """Distance of a result's pixels from its source's, accumulated part by part."""

    pixels: int = 0
    differing: int = 0
    _distances: float = 0.0

    def add(self, before: Pixels, after: Pixels, differs: Mask, of: int) -> None:
        """Add differing pixels [Y, X, 3], or [Y, X, 4] with alpha, out of `of` pixels."""
        self.pixels += of
        for top in range(0, len(before), _STRIP):
            rows = slice(top, top + _STRIP)
            if not (count := int(differs[rows].sum())):
                continue
            self.differing += count
            each = slice(None, None, 1 + count // _SAMPLE)
            some = (_on_white(levels[rows][differs[rows]][each]) for levels in (before, after))
            self._distances += count * float(cie76(*some).mean())

    @property
    def mean_de(self) -> float:
        """Return the mean distance (CIE 1976) of all pixels to four digits; 0 only if exactly 0."""
        return float(f"{self._distances / max(1, self.pixels):.4g}")


def cie76(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return CIE 1976 distances of levels [N, 3]."""
    from skimage.color import deltaE_cie76, rgb2lab

    return np.asarray(deltaE_cie76(*(rgb2lab(levels / 255) for levels in (before, after))))


def structure_of(reference: Plane, drawn: Plane, mask: Mask) -> float | None:
    """Return the correlation of band-passed lightness outside the mask; None if that is flat."""
    scale, free = scale_of(mask.shape), ~mask
    bands = [
        (blurred(plane, 2 * scale) - blurred(plane, 10 * scale))[free]
        for plane in (opponent(reference)[0], opponent(drawn)[0])
    ]
    if not free.any() or min(float(np.std(band)) for band in bands[:1]) < _FLAT:
        return None
    norm = float(np.linalg.norm(bands[0]) * np.linalg.norm(bands[1]))
    return float(bands[0] @ bands[1]) / max(norm, 1e-6)


def chroma_of(reference: Plane, drawn: Plane, mask: Mask) -> float | None:
    """Return the fraction of the reference's colour that remains outside the mask."""
    own, other = (blurred(opponent(levels)[1:], 1.0)[:, ~mask] for levels in (reference, drawn))
    strength = np.square(own).sum(0)
    colourful = strength > _LEAST_CHROMA**2
    if colourful.sum() < max(16, 0.01 * mask.size):
        return None
    part = (own * other).sum(0)[colourful] / strength[colourful]
    return float(np.median(part))


def rim_of(mask: Mask) -> float:
    """Return the fraction of the outermost pixels that are in the mask."""
    rim = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
    return float(rim.mean())


def is_most(mask: Mask) -> bool:
    """Return True if an edit is most of the picture or of its border, as a background is."""
    return float(mask.mean()) > _MOST_AREA or rim_of(mask) > _MOST_RIM


def _on_white(levels: np.ndarray) -> np.ndarray:
    """Return levels [N, 3] on white; without alpha, as they are."""
    alpha = levels[:, 3:] / 255
    return levels[:, :3] * alpha + 255 * (1 - alpha) if alpha.size else levels


def _shown(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
