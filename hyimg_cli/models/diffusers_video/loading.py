"""A checkpoint folder on a device, as the engine's `LatentVideoModel`."""

from pathlib import Path

import torch

from hyimg_cli.errors import MachineError
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, CheckpointLayout, read_layout
from hyimg_cli.models.diffusers_video.model import DiffusersVideo, VideoNetworks
from hyimg_cli.models.diffusers_video.offload import NoOffload, OneAtATime
from hyimg_cli.models.diffusers_video.weights import Place, check_weights
from hyimg_cli.parallel.devices import device_of
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.run import ModelChoice


def load_video(
    folder: Path, card: VideoCard, choice: ModelChoice, *, is_fast: bool, is_tiled: bool
) -> DiffusersVideo:
    """The checkpoint in `folder`: float32 on the CPU, bfloat16 on a GPU by default.

    Every file is checked; weights are read when they are needed, the encoders' apart from the
    network's, so that both need not fit at once. Raises CheckpointError, or MachineError.
    """
    place = _place(choice)
    layout = read_layout(folder)
    parameters = sum(check_weights(c) for c in layout.components.values() if c.has_weights)
    return DiffusersVideo(
        card, _family(layout, place, is_fast=is_fast), parameter_count=parameters, is_tiled=is_tiled
    )


def _family(layout: CheckpointLayout, place: Place, *, is_fast: bool) -> VideoNetworks:
    if layout.family == HUNYUAN_VIDEO15:
        from hyimg_cli.models.diffusers_video.hunyuan_video15 import HunyuanVideo15

        return HunyuanVideo15(layout, place, is_fast=is_fast)
    from hyimg_cli.models.diffusers_video.wan import Wan

    return Wan(layout, place)


def _place(choice: ModelChoice) -> Place:
    """The device and dtype that were asked for. Raises MachineError where there is no such GPU."""
    if choice.device == "balanced":
        raise MachineError(
            "device balanced spreads an image model's layers; a video model takes one GPU",
            hint="use --device cuda:0; more GPUs serve a video by --vae-patch-parallel-size",
            code="machine.device",
        )
    device = torch.device(device_of(choice))
    dtype = getattr(torch, choice.dtype_on(device.type))
    return Place(device, dtype, OneAtATime(device) if choice.cpu_offload else NoOffload())
