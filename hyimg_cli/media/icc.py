"""Colour profiles (ICC) of spaces that a file names in other ways: primaries, white and a curve.

Source: ICC.1:2022 (version 4); the primaries and curves of ITU-T H.273, which cICP and nclx number.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# A curve decodes levels from 0 to 1 to light from 0 to 1.
Curve = Callable[[np.ndarray], np.ndarray]
Point = tuple[float, float]
_D65: Point = (0.3127, 0.3290)
_D50_XYZ = np.array([0.9642, 1.0, 0.8249])
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
# Light of this luminance is white: BT.2408's reference white, in cd/m2 and as a level of HLG.
_WHITE_NITS, _WHITE_HLG = 203.0, 0.75
_TABLE = 4096


@dataclass(frozen=True)
class Primaries:
    """Chromaticities x, y of red, green, blue and white."""

    red: Point
    green: Point
    blue: Point
    white: Point = _D65

    def colorants(self) -> np.ndarray:
        """Return the XYZ of red, green and blue as columns, adapted to D50.

        Raises ValueError if they do not span a space.
        """
        points = np.array([self.red, self.green, self.blue, self.white])
        if not (points[:, 1] > 0).all():
            raise ValueError("a primary has no luminance")
        if abs(np.linalg.det(np.c_[points[:3], np.ones(3)])) < 1e-3:
            raise ValueError("the primaries are on a line")
        xyz = np.stack([points[:, 0], points[:, 1], 1 - points.sum(1)]) / points[:, 1]
        own = xyz[:, :3] * np.linalg.solve(xyz[:, :3], xyz[:, 3])
        cones = (_BRADFORD @ _D50_XYZ) / (_BRADFORD @ xyz[:, 3])
        adapted = np.linalg.inv(_BRADFORD) @ (cones[:, None] * _BRADFORD) @ own
        if not (np.abs(adapted) < 16).all():
            raise ValueError("the primaries are out of range")
        return np.asarray(adapted)


SRGB = Primaries((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
ADOBE_RGB = Primaries((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
ADOBE_GAMMA = 563 / 256
_C = (0.310, 0.316)
PRIMARIES = {
    1: ("sRGB", SRGB),
    4: ("BT.470 M", Primaries((0.67, 0.33), (0.21, 0.71), (0.14, 0.08), _C)),
    5: ("BT.601 (625 lines)", Primaries((0.64, 0.33), (0.29, 0.60), (0.15, 0.06))),
    6: ("BT.601 (525 lines)", Primaries((0.63, 0.34), (0.31, 0.595), (0.155, 0.07))),
    7: ("SMPTE 240M", Primaries((0.63, 0.34), (0.31, 0.595), (0.155, 0.07))),
    8: ("film", Primaries((0.681, 0.319), (0.243, 0.692), (0.145, 0.049), _C)),
    9: ("BT.2020", Primaries((0.708, 0.292), (0.17, 0.797), (0.131, 0.046))),
    11: ("DCI P3", Primaries((0.68, 0.32), (0.265, 0.69), (0.15, 0.06), (0.314, 0.351))),
    12: ("Display P3", Primaries((0.68, 0.32), (0.265, 0.69), (0.15, 0.06))),
    22: ("EBU", Primaries((0.63, 0.34), (0.295, 0.605), (0.155, 0.077))),
}


def srgb_curve(levels: np.ndarray) -> np.ndarray:
    """Decode sRGB."""
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


@lru_cache(32)
def power(gamma: float) -> Curve:
    """Return the curve of a gamma; the same function for the same gamma."""
    return lambda levels: np.asarray(levels**gamma)


def _pq(levels: np.ndarray) -> np.ndarray:
    """Decode SMPTE ST 2084; light above the reference white is clipped."""
    m1, m2, c1, c2, c3 = 1305 / 8192, 2523 / 32, 107 / 128, 2413 / 128, 2392 / 128
    root = levels ** (1 / m2)
    light = (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1)
    return np.asarray(np.minimum(light * 10_000 / _WHITE_NITS, 1))


def _hlg(levels: np.ndarray) -> np.ndarray:
    """Decode BT.2100's HLG for a display; light above the reference white is clipped."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073

    def light(level: np.ndarray) -> np.ndarray:
        scene = np.where(level <= 0.5, level**2 / 3, (np.exp((level - c) / a) + b) / 12)
        return np.asarray(scene**1.2)

    return np.asarray(np.minimum(light(levels) / light(np.array(_WHITE_HLG)), 1))


# BT.709's curve is that of a camera: programs show its pictures as they show sRGB.
CURVES: dict[int, tuple[str, Curve]] = {
    **dict.fromkeys((1, 6, 13, 14, 15), ("", srgb_curve)),
    4: ("gamma 2.2", power(2.2)),
    5: ("gamma 2.8", power(2.8)),
    8: ("linear", power(1.0)),
    16: ("PQ", _pq),
    18: ("HLG", _hlg),
}
HDR_CURVES = (_pq, _hlg)


def rgb_profile(name: str, primaries: Primaries, curve: Curve) -> bytes:
    """Return a profile of three channels. Raises ValueError for impossible primaries."""
    return _profile(b"RGB ", name, _coloured(primaries.colorants(), _table(curve)))


def grey_profile(name: str, curve: Curve) -> bytes:
    """Return a profile of one channel."""
    return _profile(b"GRAY", name, [(b"kTRC", _table(curve))])


def sampled(levels: Sequence[int]) -> Curve:
    """Return the curve that gives the light of 256 levels of sRGB."""
    light = np.maximum.accumulate(srgb_curve(np.asarray(levels) / 255))
    return lambda at: np.interp(at * 255, np.arange(256), light)


def _coloured(colorants: np.ndarray, curve: bytes) -> list[tuple[bytes, bytes]]:
    tags = [(name, _xyz(column)) for name, column in zip(_COLORANTS, colorants.T, strict=True)]
    return [*tags, *((name, curve) for name in (b"rTRC", b"gTRC", b"bTRC"))]


_COLORANTS = (b"rXYZ", b"gXYZ", b"bXYZ")


def _xyz(values: np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + np.round(values * 65536).astype(">i4").tobytes()


def _table(curve: Curve) -> bytes:
    light = np.clip(curve(np.linspace(0, 1, _TABLE)), 0, 1)
    values = np.round(light * 65535).astype(">u2").tobytes()
    return b"curv\0\0\0\0" + struct.pack(">I", _TABLE) + values


def _text(text: str) -> bytes:
    data = text.encode("utf-16-be")
    return b"mluc\0\0\0\0" + struct.pack(">II4sII", 1, 12, b"enUS", len(data), 28) + data


def _profile(space: bytes, name: str, tags: list[tuple[bytes, bytes]]) -> bytes:
    """Return the file of a version 4 display profile."""
    tags = [(b"desc", _text(name)), (b"cprt", _text("No copyright")), *tags]
    tags.append((b"wtpt", _xyz(_D50_XYZ)))
    offset = 128 + 4 + 12 * len(tags)
    index, data, places = b"", b"", dict[bytes, int]()
    for tag, value in tags:
        if value not in places:  # equal tags share their data
            places[value] = offset + len(data)
            data += value + bytes(-len(value) % 4)
        index += struct.pack(">4sII", tag, places[value], len(value))
    head = struct.pack(
        ">I4sI4s4s4s12s4s", offset + len(data), b"", 0x04400000, b"mntr", space, b"XYZ ",
        struct.pack(">6H", 2026, 1, 1, 0, 0, 0), b"acsp",
    )  # fmt: skip
    white = np.round(_D50_XYZ * 65536).astype(">i4").tobytes()
    head = head.ljust(68, b"\0") + white
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + index + data
