"""Names of places: paths of this machine, and addresses in an object store (`s3://bucket/run`).

Below every room, since every error shows a place as its user named it.
"""

import re
from pathlib import Path

# One letter would be a drive; a Path makes one slash of two.
ADDRESS_PATTERN = "([A-Za-z][A-Za-z0-9+.-]+):/"
# Paths that only a shell or Windows understands.
FOREIGN_PATTERN = r"~/|[A-Za-z]:[\\/]"


def scheme_of(name: str) -> str:
    """The scheme of an address in small letters, `s3` of `s3://bucket/run`; empty for a path, as
    `./s3:/run` is one.
    """
    match = re.match(ADDRESS_PATTERN, name)
    return match[1].lower() if match else ""


def address_of(place: Path | str) -> str:
    """The address that a name, or the path made of it, stands for; empty for a path.

    `Path("s3://bucket/run")` has lost a slash, which is put back.
    """
    match = re.match(ADDRESS_PATTERN + "/*", str(place))
    return f"{match[1].lower()}://{str(place)[match.end() :]}" if match else ""


def joined(folder: Path, name: str) -> Path:
    """A name as it leads from a folder; an address stands for itself.

    `./s3:/run` is a path, which the dot alone tells: such a one is made absolute.
    """
    if scheme_of(name):
        return Path(name)
    path = folder / name
    needs_dot = re.match(f"{ADDRESS_PATTERN}|{FOREIGN_PATTERN}", str(path))
    return path.absolute() if needs_dot and not address_of(folder) else path


def shown_place(place: Path) -> str:
    """A folder as its user named it."""
    return address_of(place) or str(place)
