"""The reference of an edit with `keep_outside`: the source after the model's own codec.

The codec's losses must not count as edits.
"""

from collections.abc import Callable

import numpy as np
import torch

from hyimg_cli.cache.memo import Memo
from hyimg_cli.media.images import SourceImage, stretch
from hyimg_cli.spec.job import Size

# Enough for some dozens of sources.
_BYTES = 128_000_000
_NO_MEMORY = (
    "not enough memory to encode and decode the source: the edit is compared with the source itself"
)


class RoundTrips(Memo[str, tuple[np.ndarray, str]]):
    """Sources that were encoded and decoded again, once per size."""

    def __init__(self) -> None:
        super().__init__(_BYTES, lambda one: one[0].nbytes)

    def of(
        self,
        image: SourceImage,
        size: Size,
        make: Callable[[np.ndarray, str], np.ndarray],
        scope: str = "",
    ) -> tuple[np.ndarray, str]:
        """Return an image, resized to `size`, after a model's `round_trip`, and a note.

        The note is empty unless memory was too short for the round trip. Each scope has its own
        entries.
        """

        def trip() -> tuple[np.ndarray, str]:
            shown = stretch(image.pixels, size)
            try:
                return make(shown, image.digest), ""
            except torch.OutOfMemoryError:
                return shown, _NO_MEMORY

        return self.get(f"{image.digest} {size} {scope}", trip)
