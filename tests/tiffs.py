"""TIFFs written byte by byte, of kinds that Pillow cannot write."""

import struct

import numpy as np

_SHORT, _LONG = 3, 4
_FORMATS = {"u": 1, "i": 2, "f": 3}


def tiff(
    values: np.ndarray,
    *,
    order: str = "<",
    photometric: int | None = None,
    planar: bool = False,
    tags: dict[int, tuple[int, ...]] | None = None,
    bits: int | None = None,
    body: bytes | None = None,
) -> bytes:
    """An uncompressed TIFF of `values` [H, W] or [H, W, C] in one strip per plane.

    `bits` and `body`: another depth, with the bytes that have it.
    """
    height, width, count = (*values.shape, 1)[:3]
    planes = [values]
    if planar:
        planes = [values[..., channel] for channel in range(count)]
    kind = values.dtype.newbyteorder(order)
    strips = [body] if body is not None else [one.astype(kind).tobytes() for one in planes]
    entries = {
        256: (width,),
        257: (height,),
        258: (bits or values.dtype.itemsize * 8,) * count,
        259: (1,),
        262: (photometric if photometric is not None else 1 if count < 3 else 2,),
        277: (count,),
        278: (height,),
        279: tuple(map(len, strips)),
        284: (2 if planar else 1,),
        339: (_FORMATS[values.dtype.kind],) * count,
    }
    entries |= tags or {}
    entries[273] = (0,) * len(strips)
    fixed = 8 + 2 + 12 * len(entries) + 4
    extra = b""
    sizes = {tag: 4 * len(found) for tag, found in entries.items()}
    at = fixed + sum(size for size in sizes.values() if size > 4)
    entries[273] = tuple(at + sum(map(len, strips[:n])) for n in range(len(strips)))
    rows = b""
    for tag, found in sorted(entries.items()):
        data = struct.pack(f"{order}{len(found)}I", *found)
        if len(data) > 4:
            data, extra = struct.pack(f"{order}I", fixed + len(extra)), extra + data
        rows += struct.pack(f"{order}HHI", tag, _LONG, len(found)) + data
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    return (
        head + struct.pack(f"{order}H", len(entries)) + rows + bytes(4) + extra + b"".join(strips)
    )
