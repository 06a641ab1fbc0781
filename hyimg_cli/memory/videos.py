"""Memory that a video takes on its device, moment by moment, and with which settings it fits a GPU;
no torch.

    text       the text encoders                        they leave when every prompt is embedded
    denoise    the transformer, activations of a step
    decode     the VAE, activations of its decode

Where networks do not take turns, transformer and VAE lie beside each other at both later moments.
Activations are estimates, of live tensors alone, without workspaces and gaps of an allocator: those
of a decode follow what was counted for the released autoencoders within a third, those of a step
what was counted for two of their blocks. A run is not refused by them: a decode that runs out of
memory goes on in smaller tiles.
"""

from dataclasses import dataclass, replace
from itertools import product

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import TRANSFORMERS, Need, in_groups
from hyimg_cli.settings.run import OFFLOADS, QUANTIZATIONS, ModelChoice, RunConfig
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.work import video_work

# Bytes of the cards that users ask about; the driver has some of each.
CARDS = {"24 GB": 24_000_000_000, "48 GB": 48_000_000_000}

# Of a pixel in 16 bits.
_PIXEL_BYTES = 3 * 2


@dataclass(frozen=True)
class VideoNeeds:
    """What a video needs on its device, by moment."""

    text: Need
    denoise: Need
    decode: Need

    @property
    def most(self) -> Need:
        """The moment that takes most."""
        return max(self.text, self.denoise, self.decode, key=lambda one: one.total)


def video_needs(
    job: VideoJob, card: VideoCard, choice: ModelChoice, *, ranks: int = 1
) -> VideoNeeds:
    """The needs of one job, its prompts embedded ahead, on one of the `ranks` that share tokens."""
    dtype = precision(choice)[1]
    sizes = card.loaded_bytes(dtype, choice.quantization)
    encoders = [size for name, size in sizes.items() if name not in (*TRANSFORMERS, "vae")]
    transformers = [sizes[name] for name in TRANSFORMERS if name in sizes]
    vae, turns = sizes.get("vae", 0), choice.cpu_offload != "none"
    if choice.cpu_offload == "group":
        transformers = [in_groups(card, size) for size in transformers]
    largest, together = max(transformers, default=0), sum(transformers) + vae
    work, width = video_work(job, card), 2 if dtype == "float32" else 1
    # K/V and the chunk at work, or all of the video's rows.
    step = work.kv_bytes * width or card.forward.working_bytes(work.grid) * width // ranks
    return VideoNeeds(
        text=Need(max(encoders, default=0) if turns else sum(encoders)),
        denoise=Need(largest if turns else together, step),
        decode=Need(vae if turns else together, decode_bytes(job, card, choice)),
    )


def decode_bytes(job: VideoJob, card: VideoCard, choice: ModelChoice) -> int:
    """Activations of a decode at their peak: of what is decoded at once, and beside it the video,
    unless its frames leave one latent frame at a time; in tiles two rows of them too.
    """
    tiles, size, frames = with_tiles(card, choice).tiles, job.size, job.num_frames
    tile, area = tiles.tile_cells * card.pixels_per_cell, size.height * size.width
    cuts = choice.tiles_decodes and max(size.height, size.width) > tile
    at_once = min(size.height, tile) * min(size.width, tile) if cuts else area
    overlap = tiles.tile_cells / tiles.stride_cells
    rows = 2 * min(size.height, tile) * size.width * overlap if cuts else 0
    leaves = not (cuts or card.decode.per_frame_pixel)
    beside = (area + int(rows)) * (card.frame_stride if leaves else frames) * _PIXEL_BYTES
    own = card.decode.per_pixel + frames * card.decode.per_frame_pixel
    is_wide = precision(choice)[1] == "float32" or card.has_float32_vae
    return (at_once * own + beside) * (2 if is_wide else 1)


def with_tiles(card: VideoCard, choice: ModelChoice) -> VideoCard:
    """The card with the tiles that are asked for."""
    return replace(card, tiles=card.tiles.halved) if choice.decode_tiles == "half" else card


def fitting(job: VideoJob, card: VideoCard, config: RunConfig, room: int) -> str | None:
    """The settings that change least with which a GPU of so many bytes takes the job: flags, empty
    where none is needed; None where none is enough.
    """
    ranks = config.parallel.context_ranks
    for quantization, offload in product(QUANTIZATIONS, OFFLOADS):
        choice = replace(
            config.model, device="cuda", quantization=quantization, cpu_offload=offload
        )
        if choice.cpu_offload == "group" and ranks > 1:
            continue
        if video_needs(job, card, choice, ranks=ranks).most.total <= room:
            flags = {"--quantization": quantization, "--cpu-offload": offload}
            return " ".join(f"{flag} {word}" for flag, word in flags.items() if word != "none")
    return None
