"""A colour for each value from 0 to 1, equal steps looking equally far apart, darkest at 0."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

# 33 evenly spaced colours of `inferno` (Smith and van der Walt, matplotlib, CC0); between them
# straight lines in sRGB, at most 2 levels off the original 256.
_INFERNO = bytes.fromhex(
    "000004 040312 0b0724 150b37 210c4a 2f0a5b 3d0965 4a0c6b 57106e 64156e 71196e "
    "7d1e6d 8a226a 972766 a32c61 b0315b bc3754 c63d4d d04545 da4e3c e35933 eb6429 "
    "f1711f f67e14 f98c0a fb9b06 fcaa0f fbba1f f9c932 f5d949 f2e865 f3f586 fcffa4 "
)
_POINTS = np.frombuffer(_INFERNO, dtype=np.uint8).reshape(-1, 3)


def color_values(values: NDArray[np.floating[Any]]) -> Pixels:
    """Values [H, W] from 0 to 1 as colours [H, W, 3]; what lies outside is shown as the end."""
    places = np.linspace(0, 1, len(_POINTS))
    channels = [np.interp(values, places, column) for column in _POINTS.T]
    return np.asarray(np.rint(np.stack(channels, axis=-1)), dtype=np.uint8)


def gradient() -> str:
    """The same scale from left to right, as a CSS value."""
    colors = (f"#{bytes(point).hex()}" for point in _POINTS)
    return f"linear-gradient(to right, {', '.join(colors)})"
