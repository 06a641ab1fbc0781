"""API keys: each has a name, and is known by its digest alone."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from hyimg_cli.errors import UsageError
from hyimg_cli.files import SETTINGS_BYTES, text_of

VARIABLE = "HYIMG_API_KEY"
# Who calls where no key is asked for.
ANYONE = "local"
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?:sha256:(?P<digest>[0-9a-f]{64})|(?P<key>\S+))"
)
_HINT = "write a line for each key: NAME KEY, or NAME sha256:DIGEST"


class Keys:
    """The keys that open a server, by the names of their callers. Without any, all may call."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = digests

    def __bool__(self) -> bool:
        return bool(self._digests)

    def caller_of(self, authorization: str | None) -> str | None:
        """The name of the key in an `Authorization` header; None where it is none of them."""
        if not self._digests:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest_of(key.strip())
        # Every key is compared, however early one fits.
        names = [name for name, own in self._digests.items() if hmac.compare_digest(own, given)]
        return names[0] if names and scheme.lower() == "bearer" else None


def read_keys(path: Path | None, environ: Mapping[str, str]) -> Keys:
    """The keys of a file, a line each, and the one in `HYIMG_API_KEY`, whose name is "default".

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
        raise UsageError(f"the keys cannot be read: {why}", where=path, code="usage.keys") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        # What stands there is a secret: no message shows it.
        found, where = _LINE.fullmatch(line), f"{path}:{number}"
        if found is None:
            raise UsageError("this is no key", where=where, hint=_HINT, code="usage.keys")
        if found["name"] in digests:
            what = f"two keys have the name {found['name']}"
            raise UsageError(what, where=where, hint="name each key once", code="usage.keys")
        own = found["digest"]
        digests[found["name"]] = bytes.fromhex(own) if own else _digest_of(found["key"])
    if not digests:
        raise UsageError("the file has no key", where=path, hint=_HINT, code="usage.keys")
    return Keys(digests)


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
