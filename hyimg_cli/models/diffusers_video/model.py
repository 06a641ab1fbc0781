"""A loaded video checkpoint as the engine knows it; families differ in their `VideoNetworks`."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from hyimg_cli.errors import JobError, OutputError
from hyimg_cli.models.diffusers_video.branches import (
    LocalBranches,
    RunningBranches,
    inputs_of,
)
from hyimg_cli.models.diffusers_video.decode import LibraryDecoder, frames
from hyimg_cli.models.diffusers_video.weights import Place
from hyimg_cli.models.latent_video import (
    Branch,
    BranchInputs,
    BranchRunner,
    LatentDecoder,
    PromptEmbedding,
    PromptEncoder,
    VideoDenoiser,
    VideoVae,
)
from hyimg_cli.spec.card import VideoCard
from hyimg_cli.spec.job import VideoJob


class VideoNetworks(Protocol):
    """What a family brings; its networks are loaded at their first use, or when it is asked."""

    @property
    def place(self) -> Place: ...

    @property
    def prompts(self) -> PromptEncoder: ...

    @property
    def vae(self) -> VideoVae: ...

    def load_transformer(self) -> None:
        """Read the transformer's weights now."""

    def has_guidance(self, job: VideoJob) -> bool:
        """Whether the job needs its negative prompt."""

    def noise_dtype(self) -> torch.dtype: ...

    def denoiser(
        self, job: VideoJob, noise_1CFYX: Tensor, branches: RunningBranches
    ) -> VideoDenoiser: ...

    def branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch: ...


class DiffusersVideo:
    """One checkpoint, as `LatentVideoModel`.

    Two parts may be replaced from outside: `branch_runner`, what evaluates a job's guidance
    branches (asked for once a job), and `decoder`, what turns the VAE's latents into pixels.
    """

    def __init__(
        self, card: VideoCard, family: VideoNetworks, *, parameter_count: int, is_tiled: bool
    ) -> None:
        self._card = card
        self.family = family
        self._parameter_count = parameter_count
        self.branch_runner: Callable[[], BranchRunner] = lambda: LocalBranches(self.branch)
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
        self.load_transformer()
        _ = self.family.vae

    def load_transformer(self) -> None:
        """Read the transformer alone: all that a branch needs."""
        self.family.load_transformer()

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        if self.family.has_guidance(job):
            return job.prompt, job.negative_prompt
        return (job.prompt,)

    @torch.no_grad()
    def denoiser(self, job: VideoJob, embeddings: Mapping[str, PromptEmbedding]) -> VideoDenoiser:
        self._check(job)
        inputs = inputs_of(job, embeddings, has_guidance=self.family.has_guidance(job))
        branches = RunningBranches(self.branch_runner(), inputs)
        return self.family.denoiser(job, self._noise(job), branches)

    @torch.no_grad()
    def branch(self, inputs: BranchInputs) -> Branch:
        like = torch.empty(
            self._latents_shape(inputs.job), dtype=self.family.noise_dtype(), device=self.device
        )
        return self.family.branch(inputs, like)

    @torch.no_grad()
    def decode_latents(self, latents_BCFYX: Tensor) -> Iterator[np.ndarray]:
        """The whole video is decoded and checked before the first piece comes back.

        Raises OutputError, a JobError, where it is not finite or shows nothing.
        """
        # Looked at here too: a VAE that clamps makes an ordinary colour of an infinity.
        if not bool(torch.isfinite(latents_BCFYX).all()):
            raise OutputError("the latents are not finite", code="output-video.not-finite")
        vae = self.family.vae
        self.family.place.offload.bring(vae.module)
        return frames(self.decoder.decode(vae.unscaled(latents_BCFYX)))

    def _noise(self, job: VideoJob) -> Tensor:
        """Drawn on the CPU in the dtype that the pipeline draws in: another dtype, other noise."""
        noise: Tensor = randn_tensor(
            self._latents_shape(job),
            generator=torch.Generator().manual_seed(job.seed),
            device=self.device,
            dtype=self.family.noise_dtype(),
        )
        return noise

    def _latents_shape(self, job: VideoJob) -> tuple[int, ...]:
        return 1, self.card.latent_channels, *self.card.latent_grid(job.size, job.num_frames)

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
