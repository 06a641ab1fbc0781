"""Cost of a group of videos: forwards, tiles, strings to embed, bytes on disk. No torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import VideoJob
from hyimg_cli.spec.plan import VideoGroup

# Of an H.264 file at our quality, for a pixel of a frame; noise takes more, a still picture less.
_FILM_BYTES = 0.1
# Of a PNG file; a photograph's colours take about half of their three bytes.
_SHOT_BYTES = 1.5
_FLOAT_BYTES = 4
# Videos of a shape that are worth a step beforehand.
FEWEST_PREWARMED = 3


@dataclass(frozen=True)
class VideoCost:
    """The cost of one group of videos.

    `latent_grid`: latent frames, rows, columns. Of the `denoise_steps` a step cache leaves
    `full_steps` to the transformer. `denoise_forwards`: the transformer's, every branch
    counted. `tiles`: rows and columns of tiles in the VAE's decode, 1 and 1 where it cuts nothing;
    `tile_shapes`: the distinct ones, rows and columns of latents. `prompts`: distinct strings
    to embed if none is on disk. `denoise_flops`: of those forwards, the least that they compute.
    `disk_bytes`: a rough size of the files; `latents_bytes`: of what is kept of one video until
    its file is written, as wide as any dtype makes it.
    """

    model: str
    size_class: str
    jobs: int
    latent_grid: tuple[int, int, int]
    denoise_steps: int
    full_steps: int
    denoise_forwards: int
    denoise_flops: int
    tiles: tuple[int, int]
    tile_shapes: tuple[tuple[int, int], ...]
    prompts: int
    disk_bytes: int
    latents_bytes: int


def video_cost(group: VideoGroup, card: VideoCard, *, with_frames: bool = False) -> VideoCost:
    """The cost of `group`."""
    grid = card.latent_grid(group.size, group.num_frames)
    rows, columns = tile_lengths(grid[1], grid[2], card.tiles)
    shapes = dict.fromkeys((row, column) for row in rows for column in columns)
    forwards = sum(card.full_steps(job) * job.branch_count for job in group.jobs)
    return VideoCost(
        model=group.model,
        size_class=group.size_class,
        jobs=len(group.jobs),
        latent_grid=grid,
        denoise_steps=sum(card.denoise_steps(job) for job in group.jobs),
        full_steps=sum(card.full_steps(job) for job in group.jobs),
        denoise_forwards=forwards,
        denoise_flops=sum(card.denoise_flops(job) for job in group.jobs),
        tiles=(len(rows), len(columns)),
        tile_shapes=tuple(shapes),
        prompts=len({text for job in group.jobs for text in strings(job)}),
        disk_bytes=disk_bytes(group.jobs, with_frames=with_frames),
        latents_bytes=latents_bytes(group.jobs[0], card),
    )


def strings(job: VideoJob) -> tuple[str, ...]:
    """The strings that a job embeds."""
    return (job.prompt,) if job.branch_count == 1 else (job.prompt, job.negative_prompt)


def tile_lengths(rows: int, columns: int, rule: TileRule) -> tuple[list[int], list[int]]:
    """Lengths of the tiles along rows and along columns of latents; a small grid is one tile.

    Source: AutoencoderKLHunyuanVideo15.tiled_decode in diffusers: tiles start a stride apart, those
    at the end are cut short. The same as parallel/tiles.py, which this room may not import.
    """
    if max(rows, columns) <= rule.tile_cells:
        return [rows], [columns]

    def along(length: int) -> list[int]:
        starts = range(0, length, rule.stride_cells)
        return [min(rule.tile_cells, length - start) for start in starts]

    return along(rows), along(columns)


def disk_bytes(jobs: Iterable[VideoJob], *, with_frames: bool) -> int:
    """Roughly what the files of `jobs` will take."""
    per_pixel = _FILM_BYTES + (_SHOT_BYTES if with_frames else 0.0)
    pixels = sum(job.size.height * job.size.width * job.num_frames for job in jobs)
    return int(pixels * per_pixel)


def latents_bytes(job: VideoJob, card: VideoCard) -> int:
    """Bytes of a job's latents, with what its step cache keeps, as wide as any dtype makes them."""
    return _one_copy(job, card) + velocity_bytes(job, card)


def velocity_bytes(job: VideoJob, card: VideoCard) -> int:
    """Bytes of the velocities that a job's step cache keeps."""
    copies = job.step_cache.copies(job.branch_count) if job.step_cache else 0
    return copies * _one_copy(job, card)


def _one_copy(job: VideoJob, card: VideoCard) -> int:
    cells = math.prod(card.latent_grid(job.size, job.num_frames))
    return card.latent_channels * cells * _FLOAT_BYTES
