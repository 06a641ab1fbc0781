"""The sizes HunyuanImage-3 draws in, by ratio token; no torch."""

from hyimg_cli.spec.card import Bucket
from hyimg_cli.spec.job import Size

# Appended by the Instruct models whatever the base size is.
_EXTRA_SIZES = (Size(1024, 768), Size(1280, 720), Size(768, 1024), Size(720, 1280))


def buckets(base_size: int, *, has_extras: bool) -> tuple[Bucket, ...]:
    """All buckets in order of their ratio index, from flat and wide to tall and narrow.

    From the square, one side grows by base/16 up to 2 base while the other shrinks to base/2; both
    ways, sorted by height/width. Source: the official `ResolutionGroup`.
    """
    step, longest, shortest = base_size // 16, base_size * 2, base_size // 2
    sizes = [Size(base_size, base_size)]
    height, width = base_size, base_size
    while height < longest or width > shortest:
        height, width = min(height + step, longest), max(width - step, shortest)
        sizes += [Size(height, width), Size(width, height)]
    sizes.sort(key=lambda size: size.height / size.width)
    if has_extras:
        known = {size.height / size.width for size in sizes}
        sizes += [size for size in _EXTRA_SIZES if size.height / size.width not in known]
    return tuple(Bucket(index, size) for index, size in enumerate(sizes))
