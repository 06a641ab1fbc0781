"""What a picture editor encodes for a job; no torch."""

from dataclasses import dataclass
from typing import Any

# Stages of the library's blocks before denoising.
OF_TEXTS, OF_PICTURES = "text_encoder", "vae_encoder"


@dataclass(frozen=True)
class Condition:
    """Texts and pictures (path and sha256) that one stage of the blocks encodes for the denoising
    of a job.
    """

    stage: str
    texts: tuple[tuple[str, str], ...]
    images: tuple[tuple[str, str], ...]
    is_guided: bool = False
    options: tuple[tuple[str, Any], ...] = ()
