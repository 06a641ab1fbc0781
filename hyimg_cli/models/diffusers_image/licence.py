"""A checkpoint's licence in a word: by its README, else that of its pipeline's releases."""

import re
from contextlib import suppress

from hyimg_cli.files import text_of
from hyimg_cli.models.diffusers_image.table import APACHE, KINDS, NON_COMMERCIAL
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout

UNKNOWN = "unknown"
# What FLUX.2 klein 4B reads of a text, three layers of Qwen3-4B; its larger releases read more.
_OF_KLEIN_4B = 3 * 2560
_README_BYTES = 1_000_000
# `license:`, and the name of one that has none of the hub's words.
_WORDS = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([\w.-]+)", re.MULTILINE)
_IS_NON_COMMERCIAL = re.compile(r"non-?commercial|\bnc\b|research", re.IGNORECASE)


def licence_of(layout: CheckpointLayout) -> str:
    """The word for it; UNKNOWN where neither says it."""
    text = ""
    with suppress(OSError, ValueError):  # a checkpoint works without a README
        text = text_of(layout.folder / "README.md", _README_BYTES)
    words = _WORDS.findall(text.split("\n---", 1)[0]) if text.startswith("---") else []
    if any(map(_IS_NON_COMMERCIAL.search, words)):
        return NON_COMMERCIAL
    if words and words[0] != "other":
        return APACHE if words[0].lower() == "apache-2.0" else str(words[0])
    if of_releases := KINDS[layout.family].licence:
        return of_releases
    width = layout.components["transformer"].config().count("joint_attention_dim", 0)
    return APACHE if width == _OF_KLEIN_4B else NON_COMMERCIAL if width > _OF_KLEIN_4B else UNKNOWN
