"""LingBot-World fast as a family."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.errors import require
from hyimg_cli.loading.checkpoint import TensorInfo, tensor_index
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.lengths import check_texts
from hyimg_cli.models.family import Family
from hyimg_cli.models.lingbot_world.card import lingbot_card
from hyimg_cli.models.lingbot_world.jobs import check_job
from hyimg_cli.models.lingbot_world.layout import FAMILY as NAME
from hyimg_cli.models.lingbot_world.layout import (
    TRANSFORMER,
    fingerprint,
    is_lingbot_world,
    lacking,
    network_shape,
    read_layout,
)
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.job import VideoJob

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel


class LingBotFolder:
    """A checkpoint folder, its weights unread; `components`: where its other parts are."""

    def __init__(self, folder: Path, model: str, components: Path | None = None) -> None:
        self.layout = read_layout(folder, components)
        self.card = lingbot_card(self.layout, model)

    def check(self, job: VideoJob) -> None:
        positions = network_shape(self.layout).rope_max_seq_len
        check_job(job, self.card, positions)
        check_texts(job, self._whole().components["tokenizer"].folder.parent, self.card)

    def load(self, choice: ModelChoice, *, is_fast: bool) -> "LatentVideoModel":
        """There is one forward."""
        require("diffusers", "av")
        from hyimg_cli.models.lingbot_world.model import load  # imports torch

        return load(self._whole(), self.card, choice)

    def _whole(self) -> CheckpointLayout:
        """The layout with all parts. Raises CheckpointError where only the transformer is there."""
        if len(self.layout.components) == 1:
            raise lacking(self.layout.folder)
        return self.layout


def _tensors(folder: Path) -> Mapping[str, Mapping[str, TensorInfo]]:
    parts = read_layout(folder).components
    return {
        name: tensor_index(part.folder, part.stem)
        for name, part in parts.items()
        if part.has_weights
    }


def _refuse_wrong(folder: Path) -> None:
    require("diffusers")
    from hyimg_cli.models.lingbot_world.weights import check_network  # imports torch

    layout = read_layout(folder)
    check_network(layout.components[TRANSFORMER], network_shape(layout))


FAMILY = Family(
    name=NAME,
    makes="videos",
    marks=is_lingbot_world,
    open=LingBotFolder,
    open_with=LingBotFolder,
    fingerprint=lambda folder: fingerprint(read_layout(folder)),
    fingerprint_with=lambda folder, components: fingerprint(read_layout(folder, components)),
    tensors=_tensors,
    refuse_wrong=_refuse_wrong,
)
