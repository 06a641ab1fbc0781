"""HunyuanVideo-1.5 and Wan, in diffusers' layout, as a family."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.errors import require
from hyimg_cli.loading.checkpoint import TensorInfo, tensor_index
from hyimg_cli.models.diffusers_video.card import video_card
from hyimg_cli.models.diffusers_video.layout import (
    HUNYUAN_VIDEO15,
    CheckpointLayout,
    is_video_checkpoint,
    read_layout,
)
from hyimg_cli.models.diffusers_video.lengths import check_texts
from hyimg_cli.models.family import Family
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel


class DiffusersFolder:
    """A checkpoint folder, its weights unread."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.card = video_card(folder, model)

    @cached_property
    def layout(self) -> CheckpointLayout:
        return read_layout(self.folder)

    def check(self, job: VideoJob) -> None:
        check_texts(job, self.folder, self.card)
        if job.lora and find_spec("diffusers"):
            from hyimg_cli.models.diffusers_video.lora import check_loras  # imports torch

            check_loras(job, self.layout)

    def load(self, choice: ModelChoice, *, is_fast: bool) -> "LatentVideoModel":
        """Float32 on the CPU, bfloat16 on a GPU by default. Every file is checked; weights are read
        when they are needed, the encoders' apart from the network's, so that both need not fit at
        once. Raises CheckpointError, or MachineError.
        """
        require("diffusers", "av")
        from hyimg_cli.models.diffusers_video.weights import check_weights, load_target

        target, parts = load_target(choice), self.layout.components.values()
        count = sum(check_weights(part) for part in parts if part.has_weights)
        if self.layout.family == HUNYUAN_VIDEO15:
            from hyimg_cli.models.diffusers_video.hunyuan_video15 import HunyuanVideo15

            return HunyuanVideo15(self.card, self.layout, target, count, choice, is_fast=is_fast)
        from hyimg_cli.models.diffusers_video.wan import Wan

        return Wan(self.card, self.layout, target, count, choice)


def _tensors(folder: Path) -> Mapping[str, Mapping[str, TensorInfo]]:
    parts = [part for part in read_layout(folder).components.values() if part.has_weights]
    return {part.name: tensor_index(part.folder, part.stem) for part in parts}


FAMILY = Family(
    name="diffusers_video",
    makes="videos",
    marks=is_video_checkpoint,
    open=DiffusersFolder,
    fingerprint=lambda folder: read_layout(folder).fingerprint(),
    tensors=_tensors,
    follows=frozenset({"quantization", "attention_backend", "compile_blocks", "cpu_offload=group"}),
)
