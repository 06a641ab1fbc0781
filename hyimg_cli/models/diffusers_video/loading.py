"""A checkpoint folder on a device, as the engine's `LatentVideoModel`."""

from pathlib import Path
from typing import Any

import torch

from hyimg_cli.errors import MachineError
from hyimg_cli.models.diffusers_video.layout import HUNYUAN_VIDEO15, read_layout
from hyimg_cli.models.diffusers_video.model import DiffusersVideo
from hyimg_cli.models.diffusers_video.offload import Offload
from hyimg_cli.models.diffusers_video.weights import LoadTarget, check_weights
from hyimg_cli.parallel.devices import device_of
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import VideoCard


def load_video(
    folder: Path, card: VideoCard, choice: ModelChoice, *, is_fast: bool
) -> DiffusersVideo:
    """The checkpoint in `folder`: float32 on the CPU, bfloat16 on a GPU by default.

    Every file is checked; weights are read when they are needed, the encoders' apart from the
    network's, so that both need not fit at once. Raises CheckpointError, or MachineError.
    """
    place, layout = place_of(choice), read_layout(folder)
    parameters = sum(check_weights(c) for c in layout.components.values() if c.has_weights)
    options: dict[str, Any] = {"parameter_count": parameters, "choice": choice}
    if layout.family == HUNYUAN_VIDEO15:
        from hyimg_cli.models.diffusers_video.hunyuan_video15 import HunyuanVideo15

        return HunyuanVideo15(card, layout, place, is_fast=is_fast, **options)
    from hyimg_cli.models.diffusers_video.wan import Wan

    return Wan(card, layout, place, **options)


def place_of(choice: ModelChoice) -> LoadTarget:
    """The device and dtype that were asked for. Raises MachineError where there is no such GPU."""
    if choice.device == "balanced":
        raise MachineError(
            "device balanced spreads an image model's layers; a video model takes one GPU",
            hint="use --device cuda:0; more GPUs serve a video by --vae-patch-parallel-size",
            code="machine.device",
        )
    device = torch.device(device_of(choice))
    dtype = getattr(torch, choice.dtype_on(device.type))
    in_groups = choice.cpu_offload == "group"
    offload = None if choice.cpu_offload == "none" else Offload(device, in_groups=in_groups)
    return LoadTarget(device, dtype, offload)
