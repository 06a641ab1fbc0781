"""A picture in its source's shape: the last step of `infer_align_image_size`.

The network draws in the sizes it knows. Where it drew in the size that a source image was fitted
to, and that source has another aspect ratio, the picture is resized to the source's.
"""

from collections.abc import Sequence
from math import sqrt

from hyimg_cli.media.images import Pixels, stretch
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.job import Size

# Source: HunyuanImage-3.0-Instruct; ratios are height / width.
_SAME_RATIO = 0.01


def aligned(pixels: Pixels, bucket: Bucket, sources: Sequence[Size], card: ModelCard) -> Pixels:
    """`pixels`, drawn in `bucket`, in the shape of the first source that shares the bucket; the
    area is that of the model's square. As they are where none does, or that one's ratio is theirs.
    """
    drawn = bucket.size.height / bucket.size.width
    for size in sources:
        if card.nearest_bucket(size.height, size.width) == bucket:
            ratio = size.height / size.width
            is_same = abs(ratio - drawn) < _SAME_RATIO
            return pixels if is_same else stretch(pixels, _of_area(ratio, card.base_size))
    return pixels


def _of_area(ratio: float, base_size: int) -> Size:
    """Sides of this height / width whose product is `base_size` squared, rounded."""
    return Size(max(1, round(base_size * sqrt(ratio))), max(1, round(base_size / sqrt(ratio))))
