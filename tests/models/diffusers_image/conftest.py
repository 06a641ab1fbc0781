"""Picture editors of the library, tiny ones, written once; sources for them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_editors
from PIL import Image


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a kind, written once."""
    folder = tmp_path_factory.mktemp("editors")

    def of(kind: str) -> Path:
        made = folder / kind
        return made if made.is_dir() else tiny_editors.write(made, kind)

    return of


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    numbers = np.random.default_rng(1)
    for number, (height, width) in enumerate(((64, 96), (80, 70))):
        pixels = numbers.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"s{number}.png")
    return ["s0.png", "s1.png"]
