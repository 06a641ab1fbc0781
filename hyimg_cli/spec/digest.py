"""Name things by content: sha256 over canonical JSON or bytes, and seeds derived from names."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyimg_cli.files import opened

_PIECE_BYTES = 1 << 20


def of_bytes(data: bytes | memoryview) -> str:
    """Return the hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def of_parts(parts: Iterable[bytes]) -> str:
    """Return the hex sha256 of all parts together."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def of_json(value: Any) -> str:
    """Return the hex sha256 of `value` as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return of_bytes(text.encode())


def of_file(path: Path, most: int | None = None) -> str:
    """Return the hex sha256 of a regular file, as it is when opened, `most` bytes at most.

    Raises OSError as `files.opened` does.
    """
    state = hashlib.sha256()
    with opened(path, most) as file:
        left = os.fstat(file.fileno()).st_size
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            state.update(piece)
            left -= len(piece)
    return state.hexdigest()


def seed_from(name: str) -> int:
    """Return a seed in 0 .. 2**31 - 1 that depends on `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
