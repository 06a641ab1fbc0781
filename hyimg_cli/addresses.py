"""Paths of this machine, and addresses in an object store (`s3://bucket/run`).

In the lowest layer, because every error shows a place as its user named it.
"""

import re
from pathlib import Path

# A single letter would be a drive; a Path turns two slashes into one.
ADDRESS_PATTERN = "([A-Za-z][A-Za-z0-9+.-]+):/"
# Paths that only a shell or Windows understands.
FOREIGN_PATTERN = r"~/|[A-Za-z]:[\\/]"


def scheme_of(name: str) -> str:
    """Return the scheme of an address in lower case; empty for a path, such as `./s3:/run`."""
    match = re.match(ADDRESS_PATTERN, name)
    return match[1].lower() if match else ""


def address_of(place: Path | str) -> str:
    """Return the address that a name or its Path stands for; empty for a path.

    `Path("s3://bucket/run")` has lost a slash, which is restored.
    """
    match = re.match(ADDRESS_PATTERN + "/*", str(place))
    return f"{match[1].lower()}://{str(place)[match.end() :]}" if match else ""


def joined(folder: Path, name: str) -> Path:
    """Return a name relative to a folder; an address stays as it is.

    Only the dot in `./s3:/run` marks it as a path, so it is made absolute.
    """
    if scheme_of(name):
        return Path(name)
    path = folder / name
    needs_dot = re.match(f"{ADDRESS_PATTERN}|{FOREIGN_PATTERN}", str(path))
    return path.absolute() if needs_dot and not address_of(folder) else path


def shown_place(place: Path) -> str:
    """Return a folder as its user named it."""
    return address_of(place) or str(place)
