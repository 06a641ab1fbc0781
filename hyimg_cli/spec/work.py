"""The work of one job by its checkpoint's card: plan, shards, time and memory ask here.

No file of the job is read. The tokens of its texts are counted by the model's family.
"""

import math
from dataclasses import dataclass

from hyimg_cli.spec.card import ModelCard, VideoCard
from hyimg_cli.spec.job import ImageJob, VideoJob
from hyimg_cli.spec.step_cache import count_full

_FLOAT_BYTES = 4
# Bytes per pixel of a frame in an H.264 file at our quality; noise takes more, a still less.
_FILM_BYTES = 0.1
# Bytes per pixel of a PNG file; a photograph takes about half of its three bytes.
_SHOT_BYTES = 1.5


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job costs. A picture whose size the model will choose counts as a square.

    `levels`: noise levels at which the model is evaluated. `denoise`: latent cells that all
    forwards move; for a video, the operations of all forwards if its card counts them. `pixels`:
    decoded, over all frames. `read`: rows of source pictures.
    """

    levels: int
    denoise: int
    pixels: int
    read: int = 0


@dataclass(frozen=True, kw_only=True)
class VideoWork(Work):
    """What a video costs. `grid`: latent frames, rows and columns, with `tokens` in a forward.

    `steps`: one per noise level, or per pass of a chunk. Of these, `full_steps` evaluate the model,
    in `forwards` of all branches together. `flops`: the minimum operations of these; 0 if the card
    counts none. `latents_bytes`: what is kept of the video until its file is written, in float32.
    `velocity_bytes`: the step cache's share of that. `kv_bytes`: its K/V and a chunk, in 16 bits; 0
    if unknown.
    """

    grid: tuple[int, int, int]
    tokens: int
    steps: int
    full_steps: int
    forwards: int
    flops: int
    latents_bytes: int
    velocity_bytes: int
    kv_bytes: int


def picture_work(job: ImageJob, card: ModelCard, first: int = 0) -> Work:
    """Return the work of a picture, from denoise step `first` on."""
    size = (card.bucket_of(job.size) or card.nearest_bucket(1, 1)).size
    cells = math.prod(card.latent_grid(size))
    levels = count_all(job, job.taken_steps, first)
    pixels, drawings = size.height * size.width, len(job.parts)
    # Layers are denoised together with their sum, which is not decoded.
    denoised, decoded = (job.layers + 1, job.layers) if job.layers else (1, drawings)
    # Source pictures that are rows of every step are added.
    each = 0 if card.reference_pixels is None else card.reference_pixels or pixels
    beside = len(job.images) * each * cells // pixels
    return Work(
        levels=levels,
        denoise=levels * card.branches(job) * (denoised * cells + beside),
        pixels=decoded * pixels,
        read=drawings * len(job.images) * (cells + card.source_vit_tokens),
    )


def count_all(job: ImageJob, steps: int, first: int = 0) -> int:
    """Return the steps of all of a picture's drawings that evaluate the model.

    Each has `steps`; the first `first` of all are done: of one drawing after the other.
    """
    done = (max(0, min(steps, first - n * steps)) for n in range(len(job.parts)))
    return sum(count_full(job.step_cache, steps, one) for one in done)


def video_work(job: VideoJob, card: VideoCard, first: int = 0) -> VideoWork:
    """Return the work of a video, from denoise step `first` on; passes of chunks count as steps."""
    rule, asked, chunks = job.step_cache, job.num_inference_steps, card.chunks
    grid = card.latent_grid(job.size, job.num_frames)
    cells, levels = math.prod(grid), count_full(rule, asked, 0 if chunks else first)
    tokens = cells // card.forward.cells_per_token
    full_steps, kv_bytes = levels, 0
    if rule is not None and card.defaults.guidance_scale_2 is not None:
        # The second transformer's first step is full, and may already be due.
        full_steps = min(asked - first, levels + 1)
    elif chunks is not None:
        full_steps = chunks.passes(grid[0], asked) - first
        in_chunk = tokens * chunks.frames // grid[0]
        kv_bytes = tokens * chunks.kv_bytes + in_chunk * chunks.live_bytes + chunks.fixed_bytes
    forwards = full_steps * job.branch_count
    flops = forwards * card.forward.flops(grid)
    if chunks is not None:
        # Each chunk attends to the chunks before it and to itself; in the last pass, the last chunk
        # leaves no K/V.
        count = grid[0] // chunks.frames
        each = tokens // count
        once = count * each * card.forward.per_token
        once += each**2 * count * (count + 1) // 2 * card.forward.per_pair
        last = each * card.forward.per_token + each**2 * count * card.forward.per_pair
        flops = ((asked + 1) * once - last) * full_steps // (full_steps + first)
    copy = card.latent_channels * cells * _FLOAT_BYTES
    velocities = copy * rule.copies(job.branch_count) if rule is not None else 0
    return VideoWork(
        levels=levels,
        denoise=flops or forwards * cells,
        pixels=job.size.height * job.size.width * job.num_frames,
        grid=grid,
        tokens=tokens,
        steps=asked - first if chunks is None else full_steps,
        full_steps=full_steps,
        forwards=forwards,
        flops=flops,
        latents_bytes=copy + velocities,
        velocity_bytes=velocities,
        kv_bytes=kv_bytes,
    )


def film_bytes(pixels: int, *, with_frames: bool) -> int:
    """Return a rough file size for videos with this many pixels, all frames counted."""
    return int(pixels * (_FILM_BYTES + (_SHOT_BYTES if with_frames else 0.0)))
