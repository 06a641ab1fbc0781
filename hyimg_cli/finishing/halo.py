"""Measure the halo of a new background: colours along its subject that no blend explains."""

import numpy as np

from hyimg_cli.finishing.outside import Edit
from hyimg_cli.finishing.planes import (
    distance_to,
    numbers,
    opponent,
    scale_of,
    spread,
)
from hyimg_cli.finishing.ring_cells import RingCells

# Along the subject, up to this far from it, per megapixel. The new background begins where a soft
# border ends, and is known from its first pixels.
_RING, _BEGINS, _KNOWN = 8.0, 10.0, 26.0
# How far the colours of both sides are carried.
_CARRIED = 5.0, 8.0
# Of 20 clean backgrounds, the largest is 0.73.
_MOST = 1.0


def halo_of(edit: Edit) -> float | None:
    """Return how far the colours along the subject are from a blend, in opponent levels.

    What most cells of the border share: a glow or an outline. None for other edits, and where
    nothing is known of both sides.
    """
    if edit.kind != "background":
        return None
    scale = scale_of(edit.mask.shape)
    away = distance_to(~edit.mask)
    ring = (away > 0) & (away <= _RING * scale)
    backdrop = (away > _BEGINS * scale) & (away <= _KNOWN * scale)
    if not ring.any() or not backdrop.any():
        return None
    own, other = opponent(edit.reference), opponent(edit.drawn)
    near, far = (reach * scale for reach in _CARRIED)
    subject, known = spread(own, numbers(~edit.mask), near)
    behind, trust = spread(other, numbers(backdrop), far)
    ring &= (known > 1e-3) & (trust > 1e-3)
    # The nearest blend of the two colours.
    to = behind - subject
    part = np.clip((to * (other - subject)).sum(0) / np.maximum(np.square(to).sum(0), 1e-3), 0, 1)
    if (cells := RingCells(ring, scale)).is_empty:
        return None
    return float(np.linalg.norm(np.median(cells.means(other - subject - part * to), axis=1)))


def halo_doubts(halo: float | None) -> tuple[str, ...]:
    """Return why a result with this halo should be looked at."""
    if halo is None or halo <= _MOST:
        return ()
    return (f"a glow or an outline runs along what was kept ({halo:.1f} levels)",)
