"""What is encoded for a job of a picture editor; no torch."""

from dataclasses import dataclass
from typing import Any

# Stages of the library's blocks in front of the denoising.
OF_TEXTS, OF_PICTURES = "text_encoder", "vae_encoder"


@dataclass(frozen=True)
class Condition:
    """What a job's denoising reads, made by one stage of its blocks: of texts and of pictures (path
    and sha256).
    """

    stage: str
    texts: tuple[tuple[str, str], ...]
    images: tuple[tuple[str, str], ...]
    is_guided: bool = False
    options: tuple[tuple[str, Any], ...] = ()
