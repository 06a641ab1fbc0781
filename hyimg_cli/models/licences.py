"""The licence of a checkpoint, from its own files or its name on the hub.

Licences have the hub's names (`apache-2.0`, `tencent-hunyuan-community`); several are joined by
` + `. Nothing is inferred from a checkpoint's architecture here.
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
# Released checkpoints, by the start of their hub ids; the longest match counts.
RELEASED = {
    "tencent/Hunyuan": TENCENT,
    "hunyuanvideo-community/": TENCENT,
    "ByteDance-Seed/BAGEL-7B-MoT": _APACHE,
    "Qwen/Qwen-Image": _APACHE,
    "Qwen/Qwen-Image-2.1": "non-commercial",
    "FireRedTeam/FireRed-Image-Edit": _APACHE,
    "black-forest-labs/FLUX.1": "flux-1-dev-non-commercial-license",
    "black-forest-labs/FLUX.1-schnell": _APACHE,
    "krea/Krea-2": "krea-2-community-license",
    "black-forest-labs/FLUX.2": _FLUX,
    "black-forest-labs/FLUX.2-klein-4B": _APACHE,
    "black-forest-labs/flux-3": "flux-kommunity-license-v1-0",
    "black-forest-labs/flux-3-image-klein-pup": _APACHE,
    "meituan-longcat/LongCat-Image": _APACHE,
    "Tongyi-MAI/Z-Image": _APACHE,
}
_MAX_BYTES = 1_000_000
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
# sha256 of Apache 2.0's text, with white space as single spaces.
_APACHE_TEXT = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
# A title is enough to forbid; to permit, the text must be the known one.
_TITLES = {
    "TENCENT HUNYUAN": TENCENT,
    "NON-COMMERCIAL": "non-commercial",
    "NONCOMMERCIAL": "non-commercial",
}
_TITLE_CHARACTERS = 300
_NON_COMMERCIAL = re.compile(r"non-?commercial|\bnc\b|research", re.IGNORECASE)


def is_non_commercial(licence: str) -> bool:
    """Return True if a licence's name allows only non-commercial use or research."""
    return _NON_COMMERCIAL.search(licence) is not None


def read_card(folder: Path) -> list[str]:
    """Return the licences in the front matter of a folder's README.md, in lower case.

    `license`, which may be a list, then `license_name`.
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
    """Return the licence of a checkpoint in a folder, by its README.md or its LICENSE file."""
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
    """Return the licence of a released checkpoint by its hub id."""
    known = (start for start in RELEASED if hub_id.lower().startswith(start.lower()))
    return RELEASED.get(max(known, key=len, default=""), UNKNOWN)


def _text_of(path: Path) -> str:
    """Return a small file's text, or an empty string if it cannot be read."""
    with suppress(OSError, ValueError):
        return text_of(path, _MAX_BYTES)
    return ""
