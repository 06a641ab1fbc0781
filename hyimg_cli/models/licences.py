"""The licence of a checkpoint, as its own files or its name on the hub state it.

A licence is named as the hub names it (`apache-2.0`, `tencent-hunyuan-community`); several of them
are joined by ` + `. Nothing is inferred from a checkpoint's architecture here.
"""

import re
from contextlib import suppress
from pathlib import Path

from hyimg_cli.files import text_of
from hyimg_cli.spec import digest

UNKNOWN = "unknown"
TENCENT = "tencent-hunyuan-community"
AND = " + "
_APACHE, _FLUX = "apache-2.0", "flux-non-commercial-license"
# Released checkpoints, by the beginning of their hub ids; the longest one that fits counts.
RELEASED = {
    "tencent/Hunyuan": TENCENT,
    "hunyuanvideo-community/": TENCENT,
    "ByteDance-Seed/BAGEL-7B-MoT": _APACHE,
    "Qwen/Qwen-Image": _APACHE,
    "Qwen/Qwen-Image-2.1": "non-commercial",
    "black-forest-labs/FLUX.1": "flux-1-dev-non-commercial-license",
    "black-forest-labs/FLUX.2": _FLUX,
    "black-forest-labs/FLUX.2-klein-4B": _APACHE,
    "meituan-longcat/LongCat-Image": _APACHE,
    "Tongyi-MAI/Z-Image": _APACHE,
}
_MAX_BYTES = 1_000_000
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
# sha256 of Apache 2.0's text, with single spaces for all white space.
_APACHE_TEXT = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
# To forbid, a title is enough; to permit, the text must be the known one.
_TITLES = {
    "TENCENT HUNYUAN": TENCENT,
    "NON-COMMERCIAL": "non-commercial",
    "NONCOMMERCIAL": "non-commercial",
}
_TITLE_CHARACTERS = 300
_NON_COMMERCIAL = re.compile(r"non-?commercial|\bnc\b|research", re.IGNORECASE)


def is_non_commercial(licence: str) -> bool:
    """True if a licence's name says that it is for non-commercial use or research alone."""
    return _NON_COMMERCIAL.search(licence) is not None


def read_card(folder: Path) -> list[str]:
    """Licences in the front matter of a folder's README.md, in small letters: `license`, each of
    them where it is a list, then `license_name`. Empty where it names none.
    """
    import yaml

    found = re.match(r"---\n(.*?)\n---", _text_of(folder / "README.md"), re.DOTALL)
    facts = None
    with suppress(yaml.YAMLError):
        facts = yaml.safe_load(found[1]) if found else None
    facts = facts if isinstance(facts, dict) else {}
    named = [facts.get("license"), facts.get("license_name")]
    flat = [one for each in named for one in (each if isinstance(each, list) else [each])]
    return [str(one).strip().lower() for one in flat if one]


def licence_in(folder: Path) -> str:
    """The licence of a checkpoint in a folder, by its card, else by its LICENSE file."""
    if words := [word for word in read_card(folder) if word != "other"]:
        return AND.join(words)
    for text in filter(None, (_text_of(folder / name) for name in _LICENCE_FILES)):
        text = " ".join(text.split())
        if digest.of_bytes(text.encode()) == _APACHE_TEXT:
            return _APACHE
        head = text[:_TITLE_CHARACTERS].upper()
        return next((word for title, word in _TITLES.items() if title in head), UNKNOWN)
    return UNKNOWN


def licence_of_release(hub_id: str) -> str:
    """The licence of a released checkpoint by its hub id."""
    known = (start for start in RELEASED if hub_id.lower().startswith(start.lower()))
    return RELEASED.get(max(known, key=len, default=""), UNKNOWN)


def _text_of(path: Path) -> str:
    """A small file's text; empty where it cannot be read: a checkpoint works without it."""
    with suppress(OSError, ValueError):
        return text_of(path, _MAX_BYTES)
    return ""
