"""Small video checkpoints for tests in every room: the embedded one, and Wan written on demand.

from tiny_video import TINY_VIDEO, write_wan
write_wan(tmp_path / "wan")                          Wan 2.1
write_wan(tmp_path / "wan", boundary_ratio=0.9)      Wan 2.2, two transformers
"""

from pathlib import Path

import hyimg_cli
from hyimg_cli.spec.card import TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size
from hyimg_cli.spec.options import OF_STEPS, OF_VIDEOS

TINY_VIDEO = Path(hyimg_cli.__file__).parent / "assets" / "tiny-video"

# The facts of a Wan that makes videos from a prompt alone; others are replaced from it.
WAN_CARD = VideoCard(
    model="tiny-video",
    family="wan",
    name="a card",
    is_trained=False,
    size_multiple=16,
    pixels_per_cell=8,
    frame_stride=4,
    latent_channels=16,
    max_prompt_tokens=512,
    tiles=TileRule(32, 24, 8),
    component_bytes=(),
    defaults=VideoDefaults(
        size=Size(480, 832),
        num_frames=81,
        fps=16,
        num_inference_steps=40,
        guidance_scale=5.0,
        flow_shift=5.0,
    ),
    follows=OF_STEPS | OF_VIDEOS | {"lora", "negative_prompt", "scheduler"},
)


def write_wan(folder: Path, *, boundary_ratio: float | None = None) -> Path:
    """A Wan checkpoint with random weights, always the same; imports torch and diffusers."""
    from tiny_checkpoints import wan

    wan.write(folder, boundary_ratio=boundary_ratio)
    return folder


def write_start(folder: Path, kind: str) -> Path:
    """A checkpoint of image-to-video in its official layout: one of START_KINDS."""
    import tiny_image_to_video

    tiny_image_to_video.KINDS[kind](folder)
    return folder


START_KINDS = ("wan21", "flf", "a14b", "5b", "hunyuan", "distilled")
