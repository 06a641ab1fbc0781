"""Short videos without loss, so that their frames come back as they were."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest


@pytest.fixture
def write_video(tmp_path: Path) -> Callable[..., Path]:
    """Writes frames (uint8 [H, W, 3]) into a file and gives its path."""

    def write(name: str, frames: list[np.ndarray]) -> Path:
        path = tmp_path / name
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264rgb", rate=Fraction(8))
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "rgb24"
            stream.options = {"crf": "0"}
            for pixels in frames:
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        return path

    return write
