"""Ready-made jobs, as the manifest's tests have them, and pictures of every mode."""

import numpy as np
from manifest.conftest import make_job
from PIL import Image

__all__ = ["in_mode", "make_job"]


def in_mode(image: Image.Image, mode: str, clear: int) -> Image.Image:
    """An RGB picture in another mode; with alpha, so many rows are clear and keep their colours."""
    if mode == "RGBA":
        alpha = np.full(image.size[::-1], 255, np.uint8)
        alpha[:clear] = 0
        image.putalpha(Image.fromarray(alpha))
    elif mode != "RGB":
        image = image.quantize(64) if mode == "P" else image.convert(mode)
    return image
