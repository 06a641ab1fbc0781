"""Say what to look at in a new background: hair, glass, shadows, and a product without detail."""

from math import sqrt

import numpy as np
from scipy import ndimage

from hyimg_cli.finishing.outside import Edit
from hyimg_cli.finishing.planes import (
    Mask,
    Pixels,
    Plane,
    blurred,
    deeper,
    luma,
    numbers,
    planes,
    reduced,
    scale_of,
    spread,
    within,
)

# What is compared along the outline is this far from the part that was kept, per megapixel, beyond
# a soft border. The outline is counted in cells with this side, by this part of their pixels.
_RING, _CELL, _LEAST_PART = (10.0, 36.0), 24.0, 0.3
# Detail is finer than this and is compared in windows of this sigma. Both pictures have it from
# this contrast, in levels; it is the same from this correlation, along this part of the outline.
_FINE, _WINDOW, _CONTRAST, _ALIKE, _LEAST_SEEN = 6.0, 14.0, 2.5, 0.5, 0.03
# A plain background is a smooth surface to within these levels in most of it. A shadow is darker by
# this, without detail, along this part of the outline.
_PLAIN, _MOST, _DARKER, _SMOOTH, _LEAST_SHADE = 2.5, 0.6, 6.0, 3.0, 0.05
# Glass is darker than a plain background, too: no cell this near to one through which the source
# shows counts as a shadow.
_BESIDE = 3
# Parts without detail are looked for at about this side. They have less contrast than this in the
# source and in the redraw, keep colours to within these levels and this fraction of them, are not
# black or white, and cover this part of the picture.
_SIDE, _FLAT, _CAST, _SHADES, _LEAST_FLAT = 160, (3.0, 4.0), (5.0, 0.06), (12.0, 243.0), 0.06
# Of the rest, this part has other colours, and its structure correlates by less than this.
_CHANGED, _MOST_ALIKE = 0.7, 0.4


def background_doubts(edit: Edit, drawn: Pixels) -> tuple[str, ...]:
    """Return what should be looked at in a new background, or in a redraw that may be one."""
    if edit.kind == "global":
        if not (share := flat_part_of(edit.reference, planes(drawn))):
            return ()
        what = f"a part without detail kept its colours ({share:.0%} of the picture)"
        return (f"{what}: if it should stay, use region_keeps inside with a mask of it",)
    if edit.kind != "background":
        return ()
    found, outline = [], _Outline(edit)
    seen = outline.see_through()
    if (share := outline.part_of(seen)) > _LEAST_SEEN:
        where = f"{share:.0%} of its outline"
        found.append(f"the source shows next to what was kept ({where}): check hair and glass")
    apart = ~ndimage.binary_dilation(seen, np.ones((3, 3)), iterations=_BESIDE)
    if (share := outline.part_of(outline.shaded() & apart)) > _LEAST_SHADE:
        where = f"{share:.0%} of its outline"
        found.append(f"the new background is darker next to what was kept ({where}): a shadow?")
    return tuple(found)


def flat_part_of(reference: Plane, drawn: Plane) -> float:
    """Return the part of the picture without detail that kept its colours, while the rest changed.

    From levels [3, Y, X] as drawn. 0 if there is none, as in a restyle.
    """
    step = max(1, round(sqrt(reference[0].size) / _SIDE))
    own, other = (reduced(levels, step) for levels in (reference, drawn))
    light = [luma(levels) for levels in (own, other)]
    same = np.abs(blurred(other - own, 1.0)) - _CAST[0] - _CAST[1] * own
    flat = (same < 0).all(axis=0) & (light[0] > _SHADES[0]) & (light[0] < _SHADES[1])
    for plane, most in zip(light, _FLAT, strict=True):
        flat &= blurred(np.square(plane - blurred(plane, 2.0)), 2.0) < most**2
    labels, count = ndimage.label(deeper(flat, 2.0))
    if not count:
        return 0.0
    part = within(labels == 1 + np.argmax(np.bincount(labels.ravel())[1:]), 3.0)
    rest = ~within(part, 6.0)
    if part.mean() < _LEAST_FLAT or not rest.any():
        return 0.0
    bands = [(blurred(plane, 2.0) - blurred(plane, 8.0))[rest] for plane in light]
    alike = abs(float(bands[0] @ bands[1])) / max(1.0, *(float(one @ one) for one in bands))
    is_new = (same > 0).any(axis=0)[rest].mean() > _CHANGED and alike < _MOST_ALIKE
    return float(part.mean()) if is_new else 0.0


class _Outline:
    """The surroundings of the part that a new background left, by its nearest pixels."""

    def __init__(self, edit: Edit) -> None:
        self._scale = scale_of(edit.mask.shape)
        away, (y, x) = ndimage.distance_transform_edt(edit.mask, return_indices=True)
        near, far = (reach * self._scale for reach in _RING)
        self._behind = (away > near) & edit.motion.inside(edit.mask.shape, near)
        self._ring = self._behind & (away <= far)
        side = max(6, round(_CELL * self._scale))
        rows, columns = (-(-length // side) for length in edit.mask.shape)
        self._shape, self._cell = (rows, columns), y // side * columns + x // side
        self._own, self._drawn = luma(edit.reference), luma(edit.drawn)

    def see_through(self) -> Mask:
        """Return the cells of the outline next to which the redraw has the source's detail."""
        both, ring = np.stack([self._own, self._drawn]), numbers(self._ring)
        fine = (both - spread(both, ring, _FINE * self._scale)[0]) * ring
        products = np.stack([fine[0] * fine[0], fine[1] * fine[1], fine[0] * fine[1]])
        (own, drawn, common), _ = spread(products, ring, _WINDOW * self._scale)
        seen = common > _ALIKE * np.sqrt(own * drawn)
        return self._cells(seen & (np.minimum(own, drawn) > _CONTRAST**2))

    def shaded(self) -> Mask:
        """Return the cells of the outline with a shadow next to them; none if not before plain."""
        none = np.zeros(self._shape, bool)
        if not self._behind.any():
            return none
        darker = _surface(self._drawn, self._behind) - self._drawn
        if float(np.quantile(np.abs(darker[self._behind][::7]), _MOST)) > _PLAIN:
            return none
        ring, sigma = numbers(self._ring), _FINE * self._scale
        smooth = spread(darker[None], ring, sigma / 2)[0]
        fine = spread(np.square(darker - smooth), ring, sigma)[0][0]
        return self._cells((smooth[0] > _DARKER) & (fine < _SMOOTH**2))

    def part_of(self, cells: Mask) -> float:
        """Return the part of the outline that these cells are."""
        return float(cells.sum() / max(1, np.count_nonzero(self._counts())))

    def _cells(self, marked: Mask) -> Mask:
        """Return the outline's cells [rows, columns] with enough marked pixels next to them."""
        count = self._counts()
        return np.asarray((count > 0) & (self._counts(marked) > _LEAST_PART * count))

    def _counts(self, marked: Mask | None = None) -> Plane:
        """Return the number of pixels next to each cell, of all or of the marked ones."""
        weights = None if marked is None else marked[self._ring]
        count = np.bincount(self._cell[self._ring], weights, self._shape[0] * self._shape[1])
        return np.asarray(count).reshape(self._shape)


def _surface(plane: Plane, where: Mask) -> Plane:
    """Return the smooth surface [Y, X], of second degree, that most pixels there have."""
    y, x = (np.mgrid[: plane.shape[0], : plane.shape[1]] + 0.5) / np.array(plane.shape)[
        :, None, None
    ]
    terms = np.stack([np.ones_like(y), y, x, y * y, y * x, x * x])
    some, values = terms[:, where][:, ::13], plane[where][::13]
    weights, fit = np.ones_like(values), np.zeros(len(terms))
    for _ in range(12):
        # Towards the least sum of distances, which a shadow hardly moves.
        fit = np.linalg.lstsq((some * weights).T, values * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(1.0, np.abs(values - fit @ some)))
    return np.tensordot(fit, terms, axes=1)
