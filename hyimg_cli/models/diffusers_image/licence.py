"""A checkpoint's licence in one word: its README's, or else the one of its pipeline's releases."""

from hyimg_cli.models.diffusers_image.table import APACHE, KINDS, NON_COMMERCIAL
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.licences import UNKNOWN, is_non_commercial, read_card

# Text width of FLUX.2 klein 4B: three layers of Qwen3-4B. Larger releases have a larger one.
_OF_KLEIN_4B = 3 * 2560


def licence_of(layout: CheckpointLayout) -> str:
    """Return the word, or UNKNOWN."""
    words = read_card(layout.folder)
    if any(map(is_non_commercial, words)):
        return NON_COMMERCIAL
    if words and words[0] != "other":
        return APACHE if words[0] == "apache-2.0" else words[0]
    if of_releases := KINDS[layout.family].licence:
        return of_releases
    width = layout.components["transformer"].config().count("joint_attention_dim", 0)
    return APACHE if width == _OF_KLEIN_4B else NON_COMMERCIAL if width > _OF_KLEIN_4B else UNKNOWN
