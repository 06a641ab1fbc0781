"""Count the memory on the device of a job whose model denoises latents, by moment; no torch.

    text       the text encoders, a text's activations  they leave when every prompt is embedded
    denoise    the transformer, activations of a step
    decode     the VAE, activations of its decode

If networks do not take turns, transformer and VAE are both in memory at the later two moments.
Activations are estimates of live tensors only, without workspaces and gaps of an allocator. For a
decode they agree with counts for the released autoencoders within a third, for a step with counts
for two of their blocks. No run is refused because of them: a decode that runs out of memory
continues in smaller tiles.
"""

from collections.abc import Sequence

from hyimg_cli.journal.keys import precision
from hyimg_cli.memory.footprint import Need, held_form, number_width, usable_bytes
from hyimg_cli.models.registry import sequences
from hyimg_cli.settings.run import ModelChoice, RunConfig
from hyimg_cli.spec.card import Networks, TileRule, VideoCard
from hyimg_cli.spec.job import ImageJob, Job, VideoJob
from hyimg_cli.spec.work import VideoWork, video_work
from hyimg_cli.tiling.tiles import halve_tiles

_TRANSFORMERS = ("transformer", "transformer_2")
# Bytes of a pixel in 16 bits.
_PIXEL_BYTES = 3 * 2


def needs_of(
    job: Job, networks: Networks, config: RunConfig, *, joined: int = 1
) -> dict[str, Need]:
    """Return one job's needs by moment, with embedded prompts, on one rank that shares tokens.

    `joined`: pictures like this one that are denoised together.
    """
    text, denoise, decode = _weights_by_moment(networks, config)
    width, choice = number_width(config), config.model
    if isinstance(job, VideoJob):
        assert isinstance(networks, VideoCard), "it is a video's"
        work, decoded = video_work(job, networks), decode_bytes(job, networks, choice)
        # K/V and the current chunk, or all of the video's rows.
        rows = work.tokens * networks.forward.token_bytes * width // config.parallel.context_ranks
        held = work.kv_bytes * width * config.batch.clips or rows
        read = networks.text_bytes * width
    else:
        known = sequences(job.model, choice.revision)
        read, held, decoded = (count * width for count in known.activations(job, config))
        held *= joined
    return {
        "text": Need(text, read),
        "denoise": Need(denoise, held),
        "decode": Need(decode, decoded),
    }


def most_joined(
    job: ImageJob, networks: Networks, config: RunConfig, room: int | None = None
) -> int:
    """Return how many pictures like this one may be denoised together, at least one.

    As many as requested, if their steps fit into `room` bytes, and into the run's memory with the
    weights.
    """
    needed, limit = needs_of(job, networks, config)["denoise"], config.batch.memory_bytes
    rooms = [room, None if limit is None else limit - needed.weights]
    fitting = [usable_bytes(one) // max(1, needed.work) for one in rooms if one is not None]
    return max(1, min([config.batch.max_size, *fitting]))


def networks_need(networks: Networks, config: RunConfig, works: Sequence[VideoWork] = ()) -> Need:
    """Return the need that decides whether a model's run is refused.

    It is the text encoders, or the other networks with the largest K/V and step cache of its jobs'
    `works`. The rest is only estimated. The text encoders leave before the other networks are
    loaded, unless every job embeds its prompt.
    """
    held = max((work.kv_bytes for work in works), default=0) * number_width(config)
    held = held * config.batch.clips + max((work.velocity_bytes for work in works), default=0)
    text, *others = _weights_by_moment(networks, config)
    weights, waiting = max(others), 0
    if _takes_turns(config):
        waiting = sum(networks.loaded_bytes(*held_form(config)).values())
    elif not config.reuse.prompt_cache:
        weights += text
    return max(Need(text, 0, waiting), Need(weights, held, waiting), key=lambda it: it.total)


def _takes_turns(config: RunConfig) -> bool:
    """Return True if only the network at work is on the GPU."""
    return config.model.cpu_offload != "none" and precision(config.model)[0] == "cuda"


def _weights_by_moment(card: Networks, config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of networks on the device while texts are embedded, in a step, in a decode.

    In main memory, these are the bytes of all ranks together.
    """
    in_groups = _takes_turns(config) and config.model.cpu_offload == "group"
    sizes = card.loaded_bytes(*held_form(config), in_groups=in_groups)
    encoders = {name: n for name, n in sizes.items() if name not in ("vae", *_TRANSFORMERS)}
    transformers = [sizes[name] for name in _TRANSFORMERS if name in sizes]
    vae = sizes.get("vae", 0)
    if not _takes_turns(config):
        if precision(config.model)[0] == "cpu":
            vae *= config.parallel.vae_ranks
            transformers = [size * config.parallel.step_ranks for size in transformers]
        return sum(encoders.values()), sum(transformers) + vae, sum(transformers) + vae
    return max(encoders.values(), default=0), max(transformers, default=0), vae


def decode_bytes(job: VideoJob, card: VideoCard, choice: ModelChoice) -> int:
    """Return the activations of a decode at their peak.

    They are for the part that is decoded at once, and for the video, unless its frames leave one
    latent frame at a time; in tiles, two rows of them are added.
    """
    tiles, size, frames = tiles_of(card, choice), job.size, job.num_frames
    tile, area = tiles.tile * card.pixels_per_cell, size.height * size.width
    cuts = choice.tiles_decodes and max(size.height, size.width) > tile
    at_once = min(size.height, tile) * min(size.width, tile) if cuts else area
    rows = 2 * min(size.height, tile) * size.width * (tiles.tile / tiles.stride) if cuts else 0
    leaves = not (cuts or card.decode.per_frame_pixel)
    beside = (area + int(rows)) * (card.frame_stride if leaves else frames) * _PIXEL_BYTES
    own = card.decode.per_pixel + frames * card.decode.per_frame_pixel
    is_wide = precision(choice)[1] == "float32" or card.has_float32_vae
    return (at_once * own + beside) * (2 if is_wide else 1)


def tiles_of(card: VideoCard, choice: ModelChoice) -> TileRule:
    """Return the requested tiles."""
    return (choice.decode_tiles == "half" and halve_tiles(card.tiles)) or card.tiles
