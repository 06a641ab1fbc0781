"""A loaded checkpoint as the engine knows it."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, N text tokens, M width,
# T H W pixels
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as fun
from torch import Tensor

from hyimg_cli.media.images import Pixels
from hyimg_cli.models.diffusers_video.encoders import TEXT, WanPrompts
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.start import StartEncoder, add_frame_mask
from hyimg_cli.models.diffusers_video.vaes import WanVae
from hyimg_cli.models.diffusers_video.weights import load_target
from hyimg_cli.models.latent import PromptEmbedding
from hyimg_cli.models.latent_video import LATENTS, ClipsModel, ImageConditioning, start_of
from hyimg_cli.models.lingbot_world.denoising import ChunkDenoiser, ClipInputs, drawn
from hyimg_cli.models.lingbot_world.layout import TRANSFORMER, NetworkShape, network_shape
from hyimg_cli.models.lingbot_world.network import LingBotNetwork
from hyimg_cli.models.lingbot_world.poses import camera_path
from hyimg_cli.models.lingbot_world.record import check_shape
from hyimg_cli.models.lingbot_world.schedule import levels
from hyimg_cli.models.lingbot_world.weights import check_all, load_network
from hyimg_cli.settings.run import ModelChoice
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob


def load(layout: CheckpointLayout, card: VideoCard, choice: ModelChoice) -> "LingBotWorld":
    """Return the checkpoint, its files checked; weights are read when needed.

    Raises CheckpointError, or MachineError for the device.
    """
    place, count = load_target(choice), check_all(layout)
    return LingBotWorld(card, layout, place, count, choice)


class LingBotStart(StartEncoder):
    """Wan's encoder, except for stretching the picture by cubic curves in float32, as published."""

    def frame(self, pixels: Pixels, view: ImageConditioning) -> Tensor:
        if view.size is None or view.fit == "crop":
            return super().frame(pixels, view)
        values_1CHW = torch.from_numpy(pixels.astype("float32") / 255).permute(2, 0, 1)[None]
        size = (view.size.height, view.size.width)
        resized = fun.interpolate((values_1CHW - 0.5) / 0.5, size=size, mode="bicubic")
        return resized[:, :, None].contiguous()


class LingBotWorld(ClipsModel):
    """A checkpoint whose transformer is our own; text encoder and VAE are Wan's."""

    prompt_encoder, start_encoder, vae_class = WanPrompts, LingBotStart, WanVae

    @property
    def shape(self) -> NetworkShape:
        return network_shape(self.layout)

    @cached_property
    def networks(self) -> list[LingBotNetwork]:
        return [load_network(self.layout.components[TRANSFORMER], self.shape, self.place)]

    def sigmas(self, job: VideoJob) -> tuple[float, ...]:
        return tuple(round(level.sigma, 6) for level in levels(job.flow_shift))

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        return (job.prompt,)

    def denoiser(self, job: VideoJob, embeddings: Mapping[Any, PromptEmbedding]) -> ChunkDenoiser:
        return self.denoiser_of([(job, embeddings)])

    @torch.no_grad()
    def denoiser_of(
        self, clips: Sequence[tuple[VideoJob, Mapping[Any, PromptEmbedding]]]
    ) -> ChunkDenoiser:
        """Return the denoiser of clips of one size, length and schedule. Raises JobError."""
        first = clips[0][0]
        check_shape(first, self.card, self.shape.rope_max_seq_len)
        network = self.networks[0]
        self.place.offload.onload(network)
        # Only prewarming asks for fewer.
        used = levels(first.flow_shift)[: first.num_inference_steps]
        inputs = [self._inputs(*clip, levels=len(used)) for clip in clips]
        return ChunkDenoiser(network, inputs, used, first.size)

    def _inputs(
        self, job: VideoJob, embeddings: Mapping[Any, PromptEmbedding], *, levels: int
    ) -> ClipInputs:
        shape, path = self.shape, camera_path(job)
        grid, stride = self.card.latent_grid(job.size, job.num_frames), self.card.frame_stride
        valid_NM = embeddings[job.prompt].tensors[TEXT]
        latents_CFYX = start_of(embeddings)[LATENTS]
        return ClipInputs(
            *drawn(job.seed, (shape.out_channels, *grid), shape.num_frames_per_block, levels),
            add_frame_mask(latents_CFYX, job.num_frames, stride, has_last=False),
            fun.pad(valid_NM, (0, 0, 0, shape.text_len - len(valid_NM))),
            torch.from_numpy(path.at(grid[0])).float(),
            path.intrinsics_of(job.size),
        )
