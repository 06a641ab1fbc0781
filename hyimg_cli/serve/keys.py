"""API keys: each has a name and is stored only as a digest."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of

VARIABLE = "HYIMG_API_KEY"
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?:sha256:(?P<digest>[0-9a-f]{64})|(?P<key>\S+))"
)
_HINT = "write one key per line, each with its own name: NAME KEY or NAME sha256:DIGEST"


class Keys:
    """The API keys of a server, by name. Without keys, it accepts every client, as "local"."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def digest_of(self, name: str) -> bytes | None:
        """Return the digest of the key of a name, or None if it has none."""
        return self._digests.get(name)

    def caller_of(self, authorization: str | None) -> str | None:
        """Return the name of the key in an `Authorization` header, or None for an unknown key."""
        if not self._digests:
            return "local"
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest_of(key.strip())
        # Compare with every key: the time must not reveal which one matches.
        names = [name for name, own in self._digests.items() if hmac.compare_digest(own, given)]
        return names[0] if names and scheme.lower() == "bearer" else None


def read_keys(path: Path | None, environ: Mapping[str, str]) -> Keys:
    """Return the keys of a file and the one in `HYIMG_API_KEY`, which is named "default".

    Raises UsageError.
    """
    digests = dict[str, bytes]()
    if key := environ.get(VARIABLE):
        digests["default"] = _digest_of(key)
    if path is None:
        return Keys(digests)
    try:
        lines = text_of(path, SETTINGS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read the keys: {why}", where=path, code="usage.keys") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        # Messages must not show the line: it contains a secret.
        found = _LINE.fullmatch(line)
        if found is None or found["name"] in digests:
            what = f"two keys are named {found['name']}" if found else "the line is not a key"
            raise UsageError(what, where=f"{path}:{number}", hint=_HINT, code="usage.keys")
        own = found["digest"]
        digests[found["name"]] = bytes.fromhex(own) if own else _digest_of(found["key"])
    if not digests:
        raise UsageError("the file contains no key", where=path, hint=_HINT, code="usage.keys")
    return Keys(digests)


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
