"""LingBot-World fast as a family: its card, and checks of jobs before loading; no torch."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hyimg_cli.errors import CheckpointError, JobError, require
from hyimg_cli.models.common.config import Config
from hyimg_cli.models.diffusers_video.fitting import refuse_unfitting
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.record import (
    WAN_DECODE,
    check_positions,
    check_texts,
    stored_facts,
    umt5_bytes,
    wan_forward,
)
from hyimg_cli.models.diffusers_video.tokenizers import check_headers
from hyimg_cli.models.family import Family, VideoCheckpoint
from hyimg_cli.models.lingbot_world.layout import FAMILY as NAME
from hyimg_cli.models.lingbot_world.layout import (
    TRANSFORMER,
    is_lingbot_world,
    network_shape,
    read_layout,
)
from hyimg_cli.models.lingbot_world.poses import camera_path
from hyimg_cli.models.lingbot_world.schedule import INDICES
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import ChunkRule, StartRule, TileRule, VideoCard, VideoDefaults
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import OF_VIDEOS

if TYPE_CHECKING:
    from hyimg_cli.models.latent_video import LatentVideoModel

_BF16_BYTES = 2
_PIXELS_PER_CELL, _FRAME_STRIDE = 8, 4
# Decoded whole, as published: one latent frame at a time, so only the size counts.
_NO_TILES = TileRule(1 << 20, 1 << 20, _PIXELS_PER_CELL)


class LingBotFolder(VideoCheckpoint):
    """A checkpoint folder, its weights unread; `components`: the folder of its other parts."""

    def __init__(self, folder: Path, model: str, components: Path | None = None) -> None:
        self.layout = read_layout(folder, components)
        _refuse_unfitting(self.layout)
        self.card = lingbot_card(self.layout, model)

    def check(self, job: VideoJob) -> None:
        shape = network_shape(self.layout)
        check_job(job, self.card, shape.rope_max_seq_len)
        check_positions(job, self.card, Config(asdict(shape), ""))
        check_texts(job, self._whole().components["tokenizer"].folder.parent, self.card)

    def advice(self, job: VideoJob) -> tuple[str, ...]:
        return self.layout.notes

    def load(self, choice: ModelChoice) -> "LatentVideoModel":
        require("diffusers", "av")
        from hyimg_cli.models.lingbot_world.model import load  # imports torch

        return load(self._whole(), self.card, choice)

    def _whole(self) -> CheckpointLayout:
        """Return the layout with all parts, or raise CheckpointError."""
        if len(self.layout.components) == 1:
            raise CheckpointError(
                "the text encoder and the VAE of this folder are .pth pickles, which can run code, "
                "so only its transformer is read",
                where=self.layout.folder,
                hint="name a Wan 2.1 checkpoint in diffusers' layout with --video-components, for "
                "example Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or use a -fast-diffusers conversion",
                code="checkpoint.components",
            )
        return self.layout


def lingbot_card(layout: CheckpointLayout, model: str) -> VideoCard:
    """Return the card of a checkpoint, called `model` by the user; bytes are of existing parts."""
    shape = network_shape(layout)
    defaults = VideoDefaults(
        size=Size(480, 832),
        num_frames=81,
        fps=16,
        num_inference_steps=4,
        guidance_scale=1.0,
        flow_shift=10.0,
    )
    facts, encoder = stored_facts(layout, defaults), layout.components.get("text_encoder")
    size, multiple = facts["defaults"].size, _PIXELS_PER_CELL * shape.patch_size[1]
    # Bytes of K/V; of the camera's scale and shift and a forward's rows in float32 (residual,
    # normed, queries, keys, values, a copy, and the feed-forward's); and of the text's K/V.
    pair = 2 * shape.num_layers * shape.width * _BF16_BYTES
    rows = 4 * (7 * shape.width + 2 * shape.ffn_dim)
    return VideoCard(
        model=model,
        size_multiple=multiple,
        pixels_per_cell=_PIXELS_PER_CELL,
        frame_stride=_FRAME_STRIDE,
        latent_channels=shape.out_channels,
        max_prompt_tokens=shape.text_len,
        tiles=_NO_TILES,
        forward=wan_forward(Config(asdict(shape), "")),
        start=StartRule(1, 1, "stretch", area=size.height * size.width, multiple=multiple),
        needs_start=True,
        has_float32_vae=True,
        guides_below_one=False,
        is_distilled=True,
        chunks=ChunkRule(shape.num_frames_per_block, pair, pair + rows, pair * shape.text_len),
        decode=WAN_DECODE,
        text_bytes=umt5_bytes(encoder.config()) if encoder else 0,
        follows=frozenset({"num_inference_steps", "flow_shift", "seed", "camera", *OF_VIDEOS}),
        reasons={"guidance_scale": "it runs without guidance", "scheduler": "it has its own"},
        **facts,
    )


def check_job(job: VideoJob, card: VideoCard, positions: int) -> None:
    """Raise JobError, with the field in `where`, for a job that the model cannot make."""
    check_shape(job, card, positions)
    if job.num_inference_steps != len(INDICES):
        what = f"the model runs {len(INDICES)} steps, not {job.num_inference_steps}"
        raise _fault(what, "num_inference_steps", "remove the field")
    if not job.camera:
        what = "the line has no camera, which the model needs"
        hint = f'set camera to a poses.npy or to keys ("none-{job.num_frames}" stands still)'
        raise _fault(what, "camera", hint)
    camera_path(job)


def check_shape(job: VideoJob, card: VideoCard, positions: int) -> None:
    """Raise JobError for a size or a number of frames that is not whole patches and chunks."""
    multiple, rule = card.size_multiple, card.chunks
    assert rule is not None, "the model works in chunks"
    if any(side < multiple or side % multiple for side in (job.size.height, job.size.width)):
        raise _fault(f"{job.size} is not a multiple of {multiple} pixels", "size", "round it")
    step = rule.frames * card.frame_stride
    least = step - card.frame_stride + 1
    if job.num_frames < least or (job.num_frames - least) % step:
        below = max(0, (job.num_frames - least) // step) * step + least
        what = f"{job.num_frames} frames do not fill chunks of {rule.frames} latent frames "
        near = f"use {below} or {below + step}"
        raise _fault(f"{what}({step} * k + {least})", "num_frames", near)
    most = (positions - 1) * card.frame_stride + 1
    if job.num_frames > most:
        what = f"the video has too many frames ({job.num_frames}, limit {most})"
        raise _fault(what, "num_frames", f"use {most} or fewer")


def _fault(what: str, field: str, hint: str) -> JobError:
    return JobError(what, where=field, hint=hint, code=f"job.{field.replace('_', '-')}")


def _refuse_unfitting(layout: CheckpointLayout) -> None:
    """Raise CheckpointError for parts that do not fit each other."""
    shape, parts = network_shape(layout), layout.components
    for name, key, expected in (
        ("text_encoder", "d_model", shape.text_dim),
        ("vae", "z_dim", shape.out_channels),
        (TRANSFORMER, "taken", 2 * shape.out_channels + _FRAME_STRIDE),
    ):
        if name not in parts:
            continue
        found = shape.in_channels if name == TRANSFORMER else parts[name].config().values.get(key)
        if found != expected:
            what = f"{key} of the {name} is {found}; the other parts need {expected}"
            raise CheckpointError(what, where=parts[name].folder, code="checkpoint.components")
    if "vae" in parts:
        refuse_unfitting(layout, ())


def _refuse_wrong(folder: Path, *components: Path) -> None:
    require("diffusers", "av")
    from hyimg_cli.models.diffusers_video.weights import check_readers  # imports torch
    from hyimg_cli.models.lingbot_world.weights import check_all

    layout = LingBotFolder(folder, "", *components).layout
    check_all(layout)
    check_readers(layout)


FAMILY = Family(
    name=NAME,
    makes="videos",
    marks=is_lingbot_world,
    open=LingBotFolder,
    takes_components=True,
    fingerprint=lambda folder, *components: read_layout(folder, *components).fingerprint(NAME),
    tensors=lambda folder, *components: read_layout(folder, *components).tensors(),
    check_headers=lambda folder, *components: check_headers(read_layout(folder, *components)),
    weights=lambda folder: read_layout(folder).weights(),
    refuse_wrong=_refuse_wrong,
)
