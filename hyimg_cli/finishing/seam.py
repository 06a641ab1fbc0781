"""Measure the seam of an edit: how its redraw differs from the source around it, and is cut off."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.outside import Edit
from hyimg_cli.finishing.planes import (
    Mask,
    Plane,
    around,
    beyond_of,
    blurred,
    distance_to,
    length,
    opponent,
    range_within,
    resized,
    scale_of,
    within,
)
from hyimg_cli.finishing.ring_cells import RingCells

# The surroundings are this far from the edit, per megapixel.
_RING, _SMOOTH = (3.0, 16.0), 1.5
# An edit goes on beyond a region if it reaches this far out, per megapixel, and differs by more
# than this there, and than this part of its median inside: a found edit has a faint rim. It is cut
# off if it does so along more than this part of the region's border.
_BEYOND, _THICK, _CUT, _CUT_STEP, _PART_OF_EDIT = 8.0, 3.0, 0.01, 3.5, 0.35
# There, differences are compared at this scale, and only beyond the levels that the source has
# within a pixel. Texture that the redraw draws anew is finer, and edges that it moved or sharpened
# stay within a wider range: stars and strands are no edit that goes on.
_COARSE, _NEAR, _FAR = 4.0, (1, 0.0), (2, 0.25)


@dataclass(frozen=True)
class Seam:
    """The seam of an edit, in opponent levels, about those of CIE 1976.

    Of the redraw around the edit, without motion and drift: `cast`, the difference from the source
    that its cells share; `step`, the difference of a cell, of which nine in ten have less. `own`:
    the source's own variation in such a cell. All are None if nothing is around the edit. `cut`:
    the part of the region's border where the edit goes on beyond it; `cut_step`: the difference
    just beyond, without what redrawn texture and moved edges explain.
    """

    cast: float | None
    step: float | None
    own: float | None
    cut: float
    cut_step: float

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return why the result should be looked at."""
        is_cut = self.cut > _CUT and self.cut_step > _CUT_STEP
        share = f"{self.cut:.0%} of its border"
        return (f"the edit goes on beyond the region ({share})",) if is_cut else ()

    def to_json(self) -> dict[str, Any]:
        """Return the `seam` of a result line's `edit`."""
        cast, step, own = (
            None if value is None else round(value, 2) for value in (self.cast, self.step, self.own)
        )
        cut = {"cut": round(self.cut, 4), "cut_step": round(self.cut_step, 2)}
        return {"cast": cast, "step": step, "own": own} | cut


def seam_of(edit: Edit) -> Seam | None:
    """Return the seam of an edit that keeps its source; None of any other."""
    if edit.kind in ("none", "global"):
        return None
    is_whole = bool(edit.found.all())
    # If everything differs, a region alone ends the edit, and all around it is its surroundings.
    found = edit.mask if is_whole else edit.found
    cells = _cells(edit, found)
    cast = step = own = None
    if cells is not None:
        differences, variations = cells
        cast = float(np.linalg.norm(np.median(differences, axis=1)))
        step = float(np.quantile(np.linalg.norm(differences, axis=0), 0.9))
        own = float(np.median(variations))
    if is_whole or edit.allowed is None:
        return Seam(cast, step, own, 0.0, 0.0)
    return Seam(cast, step, own, *_cut(edit, edit.allowed))


def _cells(edit: Edit, found: Mask) -> tuple[Plane, Plane] | None:
    """Return the mean difference [3, N] of each cell around the edit, and its variation [N]."""
    scale = scale_of(edit.mask.shape)
    near, far = (reach * scale for reach in _RING)
    # What is blended in. A light ends softly, outside its mask.
    blended = edit.mask | (resized(edit.light[3], edit.mask.shape) > 0)
    place = around(blended, far)
    away = distance_to(blended[place])
    is_drawn = edit.motion.inside(edit.mask.shape, near)[place]
    ring = (away > near) & (away <= far) & is_drawn & ~within(found, near)[place]
    reference, drawn = edit.reference[:, *place], edit.drawn[:, *place]
    if (cells := RingCells(ring, scale)).is_empty:
        return None
    smooth = opponent(blurred(reference, _SMOOTH * scale))
    variance = cells.means(np.square(smooth)) - np.square(cells.means(smooth))
    return cells.means(opponent(drawn - reference)), np.sqrt(variance.clip(0).sum(axis=0))


def _cut(edit: Edit, allowed: Mask) -> tuple[float, float]:
    """Return the part of the region's border that the edit crosses, and its difference beyond.

    The picture's own border ends no edit.
    """
    scale = scale_of(allowed.shape)
    border = allowed & ~ndimage.binary_erosion(allowed, np.ones((3, 3)), border_value=1)
    reach = _BEYOND * scale
    beyond = edit.found & ~within(allowed, reach)
    crossed = border & edit.found & within(beyond, reach + 2)
    if not crossed.any():
        return 0.0, 0.0
    just_beyond = beyond & within(allowed, reach + max(2.0, _THICK * scale))
    unlike = _unlike(edit, scale)
    step = float(np.quantile(unlike[just_beyond], 0.75))
    if step < _PART_OF_EDIT * float(np.median(unlike[edit.found & allowed])):
        return 0.0, 0.0
    return float(crossed.sum() / border.sum()), step


def _unlike(edit: Edit, scale: float) -> Plane:
    """Return the difference [Y, X] that neither redrawn texture nor moved edges explain."""
    own, other = (
        blurred(opponent(levels), _COARSE * scale) for levels in (edit.reference, edit.drawn)
    )
    near, far = (length(beyond_of(other, *range_within(own, *how))) for how in (_NEAR, _FAR))
    return np.asarray(near * (far > 0))
