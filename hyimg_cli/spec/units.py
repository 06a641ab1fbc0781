"""Numbers as people read them."""


def bytes_text(count: float) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
