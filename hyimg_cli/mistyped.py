"""Paths that do not exist: what may have been meant."""

import difflib
import itertools
import os
import re

# At most this many names of a folder are compared.
_MOST = 10_000
# Longer paths are not compared.
_LONGEST = 1000


def of_windows(path: str) -> str:
    """Return how to write a path that is written as on Windows; empty for others."""
    if drive := re.match(r"([A-Za-z]):[\\/]", path):
        rest = path[3:].replace("\\", "/")
        return f"paths of Windows are found in WSL: /mnt/{drive[1].lower()}/{rest}"
    if "\\" in path:
        return f"write folders with forward slashes: {path.replace(chr(92), '/')}"
    return ""


def nearest_path(path: str) -> str:
    """Return a hint with an existing path near one that does not exist, or an empty string.

    A shell drops single backslashes, so `pics\\a.png` may arrive as `picsa.png`.
    """
    if hint := of_windows(path):
        return hint
    if len(path) > _LONGEST:
        return ""
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    link = os.path.join(parent, name)
    if os.path.islink(link):
        return f"restore what the link names: {os.readlink(link)}"
    for at in range(1, len(name)):
        joined = os.path.join(parent, name[:at], name[at:])
        if os.path.isdir(os.path.join(parent, name[:at])) and os.path.lexists(joined):
            return f"did you mean {joined}? A shell drops single backslashes: write /"
    try:
        with os.scandir(parent or ".") as entries:
            names = {one.name.lower(): one.name for one in itertools.islice(entries, _MOST)}
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(name.lower(), names, 1, 0.75)
    return f"did you mean {os.path.join(parent, names[close[0]])}?" if close else ""
