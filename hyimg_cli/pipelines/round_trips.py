"""The reference of an edit with `keep_outside`: the source after the model's own codec, because
its losses are not an edit.
"""

from collections.abc import Callable

import numpy as np
import torch

from hyimg_cli.cache.memo import Memo
from hyimg_cli.media.images import SourceImage, stretch
from hyimg_cli.spec.job import Size

# Some dozens.
_BYTES = 128_000_000
_NO_MEMORY = (
    "not enough memory to encode and decode the source: the edit is compared with the source itself"
)


class RoundTrips(Memo[str, tuple[np.ndarray, str]]):
    """Sources encoded and decoded again, each once in a size."""

    def __init__(self) -> None:
        super().__init__(_BYTES, lambda one: one[0].nbytes)

    def of(
        self,
        image: SourceImage,
        size: Size,
        make: Callable[[np.ndarray, str], np.ndarray],
        scope: str = "",
    ) -> tuple[np.ndarray, str]:
        """An image, resized to `size`, as a model's `round_trip` gives it back; and a note where
        there is no memory for that. Each scope has its own.
        """

        def trip() -> tuple[np.ndarray, str]:
            shown = stretch(image.pixels, size)
            try:
                return make(shown, image.digest), ""
            except torch.OutOfMemoryError:
                return shown, _NO_MEMORY

        return self.get(f"{image.digest} {size} {scope}", trip)
