"""Colours other than sRGB: conversion of pictures to sRGB, and of an edit back.

littlecms converts, relative to white and with black point compensation, as browsers do. Whatever
gives the numbers of sRGB is sRGB: spaces are compared by what they do, not by name.
"""

import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from hyimg_cli.media import icc

Pixels = NDArray[np.uint8]
# The colours of a picture, as a profile's header names them.
Kind = Literal["RGB", "GRAY", "CMYK", "Lab"]
_GREY_MODES = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"}
# Profiles of sRGB differ by one level from each other.
_SAME = 2
_MOST_BYTES = 16_000_000
# A damaged profile may give any colours: greys must stay about grey, and become brighter.
_MOST_CHROMA, _LEAST_RANGE, _MOST_STEP_BACK = 64, 64, 4
_INTENT = ImageCms.Intent.RELATIVE_COLORIMETRIC
_FLAGS = ImageCms.Flags.BLACKPOINTCOMPENSATION | ImageCms.Flags.HIGHRESPRECALC
# For greys, littlecms would interpolate between a few of them: 7 levels off in a linear scan.
_EXACT = _FLAGS | ImageCms.Flags.NOOPTIMIZE
_BUILDING = Lock()
_RAMP = np.arange(256, dtype=np.uint8)[None]
_GREYS = np.repeat(_RAMP[..., None], 3, axis=2)
_STEPS = np.linspace(0, 255, 16).round().astype(np.uint8)
_ALL = np.stack(np.meshgrid(_STEPS, _STEPS, _STEPS, indexing="ij"), -1).reshape(1, -1, 3)
# The greys, then the greys in one or two channels only, then colours from all over the space.
_COLOURS = np.concatenate(
    [*(_GREYS * np.uint8(np.array(list(f"{on:03b}"), int)) for on in range(7, 0, -1)), _ALL], axis=1
)


class UnfitSpace(Exception):
    """A colour space that cannot be used; the message says why."""


@dataclass(frozen=True)
class ColourSpace:
    """Colours other than sRGB. `rgb`, `grey`, `cmyk`: ICC profiles of 3, 1 and 4 channels.

    Greys need one of the first two.
    """

    name: str
    rgb: bytes = b""
    grey: bytes = b""
    cmyk: bytes = b""
    is_hdr: bool = False

    def to_srgb(self, own: Image.Image) -> Image.Image:
        """Return an 8-bit picture in sRGB: grey as grey, CMYK as RGB, RGBA with its own alpha."""
        match own.mode:
            case "L":
                return own.point([*_greys_to_srgb(self.grey, self.rgb)])
            case "CMYK":
                return _converted(own, _transform(self.cmyk, b"", "CMYK", "RGB"))
        return _converted(own, _transform(self.rgb, b"", own.mode, own.mode))

    def deep_greys(self) -> Pixels:
        """Return the level of sRGB of each number of 16 bits, [65536], by the profile `grey`."""
        ramp = Image.fromarray(np.arange(1 << 16, dtype=np.uint16)[None])
        found = _converted(ramp, _transform(self.grey, b"", ramp.mode, "RGB"))
        return np.asarray(found)[0, :, 1]

    def from_srgb(self, pixels: Pixels) -> Pixels:
        """Return colours [H, W, 3] in the numbers of `rgb`; colours beyond it are clipped."""
        back = _transform(b"", self.rgb, "RGB", "RGB")
        return np.asarray(_converted(Image.fromarray(pixels), back))

    @property
    def can_return(self) -> bool:
        """Return whether an edit can be converted to this space."""
        with suppress(UnfitSpace):
            return bool(self.rgb and not self.is_hdr and _transform(b"", self.rgb, "RGB", "RGB"))
        return False


def kind_of(mode: str) -> Kind:
    """Return the colours of Pillow's `mode`."""
    if mode in _GREY_MODES:
        return "GRAY"
    return "CMYK" if mode == "CMYK" else "Lab" if mode == "LAB" else "RGB"


def space_of_profile(profile: bytes, kind: Kind) -> ColourSpace | None:
    """Return the space of a picture's ICC profile; None for sRGB.

    Raises UnfitSpace for a profile that is damaged, or is not for pictures of this kind.
    """
    if len(profile) > _MOST_BYTES:
        raise UnfitSpace(f"it is too large ({len(profile):,} bytes)")
    found = _space_of_profile(profile, kind)
    if isinstance(found, str):
        raise UnfitSpace(found)
    return found


@lru_cache(32)
def _space_of_profile(profile: bytes, kind: Kind) -> ColourSpace | str | None:
    """Return the space, or the reason why it is unfit."""
    try:
        opened = _opened(profile)
        of = opened.profile.xcolor_space.strip()
        name = _printable(opened.profile.profile_description or "") or "the colour profile"
    except Exception:  # ImageCms raises errors of several kinds
        return "it is damaged"
    if of != kind and (of, kind) != ("RGB", "GRAY"):
        return f"it is for {of} pictures"
    if kind == "Lab":
        return None  # Pillow converts these
    try:
        match of:
            case "GRAY":
                curve = icc.sampled(_greys_to_srgb(profile, b""))
                coloured = icc.rgb_profile(name, icc.SRGB, curve)
                return _unless_srgb(ColourSpace(name, coloured, profile), kind)
            case "CMYK":
                return _unless_srgb(ColourSpace(name, cmyk=profile), kind)
        return _unless_srgb(ColourSpace(name, profile), kind)
    except UnfitSpace as fault:
        return str(fault)


@lru_cache(32)
def space_of(
    name: str, primaries: icc.Primaries, curve: icc.Curve, kind: Kind
) -> ColourSpace | None:
    """Return a space of these primaries and this curve; None for sRGB.

    Raises UnfitSpace for impossible primaries.
    """
    try:
        rgb = icc.rgb_profile(name, primaries, curve)
    except ValueError as error:
        raise UnfitSpace(str(error)) from error
    is_hdr = curve in icc.HDR_CURVES
    return _unless_srgb(ColourSpace(name, rgb, icc.grey_profile(name, curve), is_hdr=is_hdr), kind)


def _unless_srgb(space: ColourSpace, kind: Kind) -> ColourSpace | None:
    """Return None for sRGB's own numbers. Raises UnfitSpace for impossible colours."""
    if kind == "CMYK":
        # Less and less ink.
        shown = np.zeros((1, 256, 4), np.uint8)
        shown[..., 3] = _RAMP[:, ::-1]
        found = np.asarray(space.to_srgb(Image.fromarray(shown, "CMYK")))
    else:
        shown = _RAMP if kind == "GRAY" else _COLOURS
        found = np.asarray(space.to_srgb(Image.fromarray(shown)))
    greys = found[0, :256].reshape(256, -1).astype(int)
    light = greys.mean(axis=1)
    is_possible = (
        np.ptp(greys, axis=1).max() <= _MOST_CHROMA
        and np.ptp(light) >= _LEAST_RANGE
        and (light >= np.maximum.accumulate(light) - _MOST_STEP_BACK).all()
    )
    if not is_possible:
        raise UnfitSpace("it is damaged")
    is_same = found.shape == shown.shape and np.abs(found - shown.astype(int)).max() <= _SAME
    return None if is_same else space


@lru_cache(32)
def _greys_to_srgb(grey: bytes, rgb: bytes) -> Sequence[int]:
    """Return the levels of sRGB of 256 greys in the numbers of `grey`, or of `rgb` without it."""
    if grey:
        found = _converted(Image.fromarray(_RAMP), _transform(grey, b"", "L", "RGB"))
    else:
        found = _converted(Image.fromarray(_GREYS), _transform(rgb, b"", "RGB", "RGB"))
    return [int(level) for level in np.asarray(found)[0, :, 1]]


@lru_cache(64)
def _transform(
    own: bytes, other: bytes, own_mode: str, other_mode: str
) -> ImageCms.ImageCmsTransform:
    """Return the conversion between two profiles; an empty one is sRGB. Raises UnfitSpace."""
    flags = _EXACT if kind_of(own_mode) == "GRAY" else _FLAGS
    try:
        with _BUILDING:
            return ImageCms.buildTransform(
                _opened(own), _opened(other), own_mode, other_mode, _INTENT, flags
            )
    except Exception as error:  # ImageCms raises errors of several kinds
        raise UnfitSpace("it is damaged") from error


def _opened(profile: bytes) -> ImageCms.ImageCmsProfile:
    if profile:
        return ImageCms.ImageCmsProfile(io.BytesIO(profile))
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _converted(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    """Return a picture converted; only its alpha is kept."""
    made = ImageCms.applyTransform(image, transform)
    assert made is not None, "it is not converted in place"
    made.info.pop("icc_profile", None)
    return made


def _printable(name: str) -> str:
    said = " ".join("".join(one if one.isprintable() else " " for one in name).split())
    return said if len(said) <= 60 else f"{said[:59]}…"
