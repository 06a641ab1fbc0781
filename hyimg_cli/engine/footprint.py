"""What a run will hold in memory at once, before anything is loaded; no torch.

    weights       as held once loaded: by dtype and quantization
    K/V           of the jobs that work together: context and branches; and of prefixes they share
    activations   of one denoise step of all of them, or of one picture in the VAE: the larger

Weights and K/V are exact; activations are the widest moment that the card knows of. What libraries
take for themselves (a GPU's context, workspaces) is not in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyimg_cli.engine.keys import precision
from hyimg_cli.errors import JobError
from hyimg_cli.models.registry import job_tokens
from hyimg_cli.spec.card import ModelCard
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.plan import Group, Plan
from hyimg_cli.spec.run import RunConfig

_BF16_BYTES = 2


@dataclass(frozen=True)
class Share:
    """What one more job takes: bytes of K/V, and of its rows in a denoise step."""

    kv: int = 0
    activations: int = 0


@dataclass(frozen=True)
class Footprint:
    """Bytes held at once while `together` jobs work."""

    together: int
    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def share_of(job: ImageJob, card: ModelCard, dtype: str, revision: str | None = None) -> Share:
    """K/V of the job's context and branches, its rows in a denoise step, in `dtype`.

    A job whose sequence cannot be built fails later, for its own reason, and takes none.
    """
    square = [Size(1, 1)] * len(job.images)
    try:
        tokens = job_tokens(job, square, assumed_think=job.text.max_new_tokens, revision=revision)
    except JobError:
        return Share()
    live = tokens.branches * tokens.step_rows
    kv = (2 * tokens.positive + tokens.negative + live) * card.kv_bytes_per_token
    width = 4 if dtype == "float32" else 2
    return Share(
        kv * width // _BF16_BYTES, live * card.activation_bytes_per_row * width // _BF16_BYTES
    )


def footprint(
    jobs: Sequence[ImageJob], card: ModelCard, config: RunConfig, *, shared_kv_bytes: int = 0
) -> Footprint:
    """The most that one model's jobs take, `config.batch.max_size` of the largest together.

    A session that finds less memory free than that lets fewer work together.
    """
    choice = config.model
    dtype = precision(choice)[1]
    shares = [share_of(job, card, dtype, choice.revision) for job in jobs]
    together = min(config.batch.max_size, len(jobs))
    kv = together * max((share.kv for share in shares), default=0)
    rows = together * max((share.activations for share in shares), default=0)
    decode = max((_decode_bytes(job, card, choice.vae_use_tiling) for job in jobs), default=0)
    return Footprint(
        together=together,
        weights=card.loaded_bytes(dtype, choice.quantization),
        kv=kv + shared_kv_bytes,
        activations=max(rows, decode),
    )


def footprints(
    plan: Plan, config: RunConfig, card_of: Callable[[str], ModelCard], *, shared_kv_bytes: int
) -> dict[str, Footprint]:
    """By picture model, the group that takes most. One model is resident at a time."""
    largest: dict[str, Footprint] = {}
    for group in plan.groups:
        if not isinstance(group, Group):
            continue
        card = card_of(group.model)
        found = footprint(group.jobs, card, config, shared_kv_bytes=shared_kv_bytes)
        if group.model not in largest or found.total > largest[group.model].total:
            largest[group.model] = found
    return largest


def _decode_bytes(job: ImageJob, card: ModelCard, uses_tiles: bool) -> int:
    """Bytes of one picture in the VAE; one whose size is still open is taken to be the largest."""
    bucket = card.bucket_of(job.size)
    sizes = [bucket.size] if bucket else [each.size for each in card.buckets]
    pixels = max(size.height * size.width for size in sizes)
    if uses_tiles and card.tile_pixels:
        pixels = min(pixels, card.tile_pixels**2)
    return pixels * card.decode_bytes_per_pixel
