"""A loaded video checkpoint behind the engine's face; what differs by family is a `Family`."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from hyimg_cli.errors import JobError
from hyimg_cli.models.diffusers_video.decode import LibraryDecoder, frames
from hyimg_cli.models.diffusers_video.weights import Place
from hyimg_cli.models.latent_video import (
    Branch,
    LatentDecoder,
    PromptEmbedding,
    PromptEncoder,
    RunBranches,
    VideoDenoiser,
    VideoVae,
)
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob


class Family(Protocol):
    """What a family brings; its networks are loaded at their first use, or by `load`."""

    @property
    def place(self) -> Place: ...

    @property
    def prompts(self) -> PromptEncoder: ...

    @property
    def vae(self) -> VideoVae: ...

    def load(self) -> None:
        """Read the transformer's and the VAE's weights now."""

    def has_guidance(self, job: VideoJob) -> bool:
        """Whether the job needs its negative prompt."""

    def noise_dtype(self) -> torch.dtype: ...

    def denoiser(
        self,
        job: VideoJob,
        embeddings: Mapping[str, PromptEmbedding],
        noise_1CFYX: Tensor,
        run_branches: RunBranches,
    ) -> VideoDenoiser: ...


def one_after_another(branches: Sequence[Branch]) -> list[Tensor]:
    """Every branch's velocity, in this process."""
    return [branch() for branch in branches]


class DiffusersVideo:
    """One checkpoint, as `LatentVideoModel`.

    Two parts may be replaced from outside: `run_branches`, which evaluates a step's guidance
    branches, and `decoder`, which turns the VAE's latents into pixels.
    """

    def __init__(
        self, card: VideoCard, family: Family, *, parameter_count: int, is_tiled: bool
    ) -> None:
        self._card = card
        self.family = family
        self._parameter_count = parameter_count
        self.run_branches: RunBranches = one_after_another
        self.decoder: LatentDecoder = LibraryDecoder(lambda: family.vae, is_tiled=is_tiled)

    @property
    def card(self) -> VideoCard:
        return self._card

    @property
    def device(self) -> torch.device:
        return self.family.place.device

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return self.family.place.dtype_name

    @property
    def parameter_count(self) -> int:
        """Of every component, loaded or not."""
        return self._parameter_count

    @property
    def prompts(self) -> PromptEncoder:
        return self.family.prompts

    @property
    def vae(self) -> VideoVae:
        return self.family.vae

    def load_weights(self) -> None:
        """Read the transformer and the VAE now, not at the first job."""
        self.family.load()

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        if self.family.has_guidance(job):
            return job.prompt, job.negative_prompt
        return (job.prompt,)

    @torch.no_grad()
    def denoiser(self, job: VideoJob, embeddings: Mapping[str, PromptEmbedding]) -> VideoDenoiser:
        self._check(job)
        return self.family.denoiser(job, embeddings, self._noise(job), self.run_branches)

    @torch.no_grad()
    def decode_latents(self, latents_BCFYX: Tensor) -> Iterator[np.ndarray]:
        """The whole video is decoded and checked before the first piece comes back.

        Raises OutputError, a JobError, where it is not finite or shows nothing.
        """
        return frames(self.decoder.decode(self.family.vae.unscaled(latents_BCFYX)))

    def _noise(self, job: VideoJob) -> Tensor:
        """Drawn on the CPU in the dtype that the pipeline draws in: another dtype, other noise."""
        shape = (1, self.card.latent_channels, *self.card.latent_grid(job.size, job.num_frames))
        generator = torch.Generator().manual_seed(job.seed)
        noise: Tensor = randn_tensor(
            shape, generator=generator, device=self.device, dtype=self.family.noise_dtype()
        )
        return noise

    def _check(self, job: VideoJob) -> None:
        """The library would round sizes and frames down without a word."""
        multiple, stride = self.card.size_multiple, self.card.frame_stride
        if min(job.size.height, job.size.width) < multiple or (
            job.size.height % multiple or job.size.width % multiple
        ):
            raise JobError(
                f"size {job.size} is not a multiple of {multiple} pixels each way",
                code="job.size",
            )
        if job.num_frames < 1 or (job.num_frames - 1) % stride:
            raise JobError(
                f"{job.num_frames} frames are not {stride} x k + 1",
                hint=f"for example {max(job.num_frames, 1) // stride * stride + 1}",
                code="job.num-frames",
            )
