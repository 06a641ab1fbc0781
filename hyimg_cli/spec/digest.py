"""How things are named by content: sha256 over canonical JSON or bytes, and seeds made from
names.
"""

import hashlib
import json
from pathlib import Path
from typing import Any


def of_bytes(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def of_json(value: Any) -> str:
    """Hex sha256 of `value` as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return of_bytes(text.encode())


def of_file(path: Path) -> str:
    """Hex sha256 of a file's bytes. Raises OSError as `open` does."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seed_from(name: str) -> int:
    """A seed in 0 .. 2**31 - 1 that depends on `name` alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
