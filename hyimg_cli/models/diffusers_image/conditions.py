"""What is encoded for a job of a picture editor; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, SOURCE_IMAGES
from hyimg_cli.models.diffusers_image.table import Kind
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob

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


def list_conditions(
    kind: Kind, card: ModelCard, job: ImageJob, digests: Sequence[str]
) -> list[tuple[str, Condition]]:
    """What the job's denoising reads, in order, each with its kind of the disk cache; of a picture
    that is given twice, twice.
    """
    is_guided = kind.is_guided(job)
    texts = [("prompt", job.prompt)]
    if is_guided and kind.negative is not None:
        texts.append(("negative_prompt", job.negative_prompt))
    images = tuple(zip(job.images, digests, strict=True))
    given = kind.own_inputs(job, card).items()
    options = tuple((name, value) for name, value in given if name in kind.of_encoders)
    shown, known = (images, options) if kind.shows_pictures else ((), ())
    found = [(PROMPT_EMBEDDINGS, Condition(OF_TEXTS, tuple(texts), shown, is_guided, known))]
    # For its latents each picture is encoded alone, as the blocks do.
    for one in images:
        found.append((SOURCE_IMAGES, Condition(OF_PICTURES, (), (one,), options=options)))
    return found
