"""PNG files with any text in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin


def write_png(path: Path, pixels: Any, texts: Mapping[str, str]) -> None:
    """A PNG of RGB bytes with a text chunk for each of `texts`, by keyword."""
    chunks = PngImagePlugin.PngInfo()
    for keyword, text in texts.items():
        chunks.add_text(keyword, text)
    Image.fromarray(pixels).save(path, pnginfo=chunks)
