"""Format numbers and names for people."""

from collections.abc import Mapping, Sequence


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 job", "2,000 jobs", "3 branches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def names_text(names: Sequence[str], most: int = 5) -> str:
    """Return the first names and the number of the others: "a, b, c, d, e and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(parts: Mapping[str, Sequence[str]]) -> str:
    """Return the parts that have names: "1 missing: a; 2 unexpected: b, c"; empty without any."""
    found = (f"{len(names)} {what}: {names_text(names)}" for what, names in parts.items() if names)
    return "; ".join(found)


def bytes_text(count: float) -> str:
    """Return bytes in the unit that keeps the number short."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def time_text(seconds: float) -> str:
    """Return a duration: 0.36 s, 9.3 s, 45 s, 4 min 10 s, 3 h 12 min."""
    if 0.05 <= seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, size, below in (("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            whole = round(whole / below) * below
            rest = whole % size // below
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
