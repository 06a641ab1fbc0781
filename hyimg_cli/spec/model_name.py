"""A model's name: a folder, a hub id, or a file of weights with the folder of its other parts.

    FILE.gguf+FOLDER_OR_ID      FILE.safetensors+FOLDER_OR_ID

One text names both, so that everything that distinguishes models distinguishes these, too.
"""

import re

_FILE = r".+?\.(?:gguf|safetensors)"
_SINGLE = re.compile(_FILE, re.IGNORECASE | re.DOTALL)
_WITH_PARTS = re.compile(rf"({_FILE})\+(.+)", re.IGNORECASE | re.DOTALL)


def names_file(model: str) -> bool:
    """Return True for the name of a file of weights, with or without its other parts."""
    return _SINGLE.fullmatch(parts_of(model)[0]) is not None


def parts_of(model: str) -> tuple[str, str]:
    """Return the folder, hub id or file, and the folder or id of a file's other parts or ""."""
    found = _WITH_PARTS.fullmatch(model)
    return (found[1], found[2]) if found else (model, "")


def with_components(model: str, components: str | None) -> str:
    """Return a file's name with the folder or id of its other parts; other names unchanged.

    Parts that a name already has stay.
    """
    weights, own = parts_of(model)
    return model if own or not components or not names_file(weights) else f"{weights}+{components}"
