"""Masks: which pixels of a picture may be edited.

A mask is white where edits are allowed. Of one with transparency, its alpha channel cannot say what
is meant: a hole in a photo and strokes on a clear layer look alike. Nor can colours under clear
pixels, which programs leave there by chance. So its user says it.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hyimg_cli.errors import SourceImageError

_FLAT = "a mask without transparency, white where edits are allowed"


def levels_of(mask: Image.Image, edits_where: str, path: Path) -> NDArray[np.uint8]:
    """Return the levels [H, W] of a mask, above 127 where edits are allowed.

    `mask`: upright, RGBA only if it has transparency. `edits_where`: `transparent` or `opaque`,
    if its alpha channel decides. Raises SourceImageError, `source.region`, if it has two readings
    or allows nothing.
    """
    has_alpha = mask.mode == "RGBA"
    levels = np.asarray(mask.getchannel("A") if has_alpha else mask.convert("L"))
    if has_alpha and not edits_where:
        share = share_of(255 - levels)
        what = "the mask has transparency, which has two readings: edit the transparent "
        what += f"{share:.0%} of the picture, or the opaque {1 - share:.0%}"
        hint = f"write region as transparent:PATH or opaque:PATH, or give {_FLAT}"
        raise _fault(what, hint, path)
    if edits_where and not has_alpha:
        hint = f"erase parts of it, or give {_FLAT}"
        raise _fault("the mask is not transparent anywhere", hint, path)
    if edits_where == "transparent":
        levels = 255 - levels
    if not (levels > 127).any():
        what = f"the mask is black (brightest level {levels.max()} of 255)"
        what = f"no pixel of the mask is {edits_where}" if has_alpha else what
        raise _fault(what, f"make it {edits_where or 'white'} where edits are allowed", path)
    return levels


def share_of(levels: NDArray[np.uint8]) -> float:
    """Return the fraction of a picture in which levels [H, W] allow edits."""
    return round(float((levels > 127).mean()), 5)


def share_text(share: float) -> str:
    """Return the fraction of a picture that a region is, in words."""
    return f"{share:.{0 if share >= 0.1 else 1}%} of the picture"


def _fault(what: str, hint: str, path: Path) -> SourceImageError:
    return SourceImageError(what, where=path, hint=hint, code="source.region")
