"""A loaded video checkpoint as the engine knows it; a family is a subclass of `DiffusersVideo`."""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.errors import JobError
from hyimg_cli.models.diffusers_video.branches import LocalBranches, RunningBranches, inputs_of
from hyimg_cli.models.diffusers_video.context import SplitTokens
from hyimg_cli.models.diffusers_video.decode import (
    LocalDecoder,
    frames_by,
    refuse_infinite,
    smaller_tilings,
    tiling_of,
)
from hyimg_cli.models.diffusers_video.denoising import Denoiser, Velocity, forget_step_cache
from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
from hyimg_cli.models.diffusers_video.lora import Adapters, left_out
from hyimg_cli.models.diffusers_video.networks import finish_network, load_network
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.start import StartEncoder
from hyimg_cli.models.diffusers_video.weights import LoadTarget
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
from hyimg_cli.models.lora_files import lora_file
from hyimg_cli.settings.run import DecodeTiles, ModelChoice
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import VideoJob


class DiffusersVideo(ABC):
    """One checkpoint, as `LatentVideoModel`: its networks are loaded at their first use, or when it
    is asked.

    Two parts may be replaced from outside: `branch_runner`, what evaluates a job's guidance
    branches (asked for once a job), and `decoder`, what turns the VAE's latents into pixels.
    """

    # Whether sigmas are a straight line, not spaced by the scheduler's own rule.
    has_linear_sigmas: bool

    def __init__(
        self,
        card: VideoCard,
        layout: CheckpointLayout,
        place: LoadTarget,
        *,
        parameter_count: int,
        choice: ModelChoice,
    ) -> None:
        """`parameter_count`: of every component, loaded or not. `choice`: how the transformer is
        held and run, and whether latents are decoded in tiles.
        """
        self.card, self.layout, self.place, self.choice = card, layout, place, choice
        self.parameter_count = parameter_count
        # Looked at once, however many jobs have the file.
        self._left_out = cache(left_out)
        self.branch_runner: Callable[[], BranchRunner] = lambda: LocalBranches(self.branch)
        self.is_tiled, self.tiles = choice.tiles_videos, choice.decode_tiles
        if self.is_tiled and self.tiles == "auto":
            self.tiles = "own"
        self._is_off_device = False
        self.decoder: LatentDecoder = LocalDecoder(lambda: self.vae)

    @abstractmethod
    def new_prompts(self) -> PromptEncoder:
        """The text encoders; no weight is read."""

    @abstractmethod
    def new_vae(self) -> VideoVae:
        """The VAE, read now."""

    def finished(self, latents_BCFYX: Tensor, start: Mapping[str, Tensor]) -> Tensor:
        """The last step's latents as they are decoded."""
        return latents_BCFYX

    def network_of(self, schedule: JobScheduler) -> list[int]:
        """Number of the network that takes each step."""
        return [0] * len(schedule.levels)

    @abstractmethod
    def has_guidance(self, job: VideoJob) -> bool:
        """True if the job needs its negative prompt."""

    @abstractmethod
    def noise_dtype(self) -> torch.dtype: ...

    @abstractmethod
    def guided(self, job: VideoJob, schedule: JobScheduler, branches: RunningBranches) -> Velocity:
        """How a job's branches make the velocity of each of its steps."""

    @abstractmethod
    def new_branch(self, inputs: BranchInputs, noise_like_1CFYX: Tensor) -> Branch: ...

    def prepared(self, network: Any) -> Any:
        """A transformer that was just read, as the family runs it."""
        return network

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return self.place.dtype_name

    @cached_property
    def prompts(self) -> PromptEncoder:
        return self.new_prompts()

    @cached_property
    def pictures(self) -> StartEncoder:
        return StartEncoder(
            self.layout, self.encoder_place, lambda: self.vae, is_tiled=lambda: self.is_tiled
        )

    @property
    def encoder_place(self) -> LoadTarget:
        """Where the image encoder works."""
        return self.place

    @cached_property
    def vae(self) -> VideoVae:
        return self.new_vae()

    @cached_property
    def networks(self) -> list[Any]:
        """The transformer, or the high-noise one and the low-noise one."""
        found = (self.layout.components.get(name) for name in ("transformer", "transformer_2"))
        loaded = (load_network(part, self.place, self.choice) for part in found if part)
        return [finish_network(self.prepared(one), self.place, self.choice) for one in loaded]

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRAs of the job at work."""
        return Adapters(self.networks, self.layout)

    @cached_property
    def context(self) -> SplitTokens:
        """The transformers as ranks share their tokens."""
        by_token = self.layout.expands_timesteps
        return SplitTokens(self.networks, self.device, by_token=by_token)

    def load_weights(self) -> None:
        """Read the transformer and the VAE now, not at the first job."""
        self.load_transformer()
        _ = self.vae

    def load_transformer(self) -> None:
        """Read the transformer alone: all that a branch needs."""
        _ = self.networks

    def release_transformer(self) -> None:
        """Move the transformer to main memory; the next job's branches bring it back."""
        self.place.release()
        if self.place.offload is None:
            for network in self.__dict__.get("networks", ()):
                network.to("cpu")
                self._is_off_device = True
        gc.collect()

    def _bring_back(self) -> None:
        if self._is_off_device:
            for network in self.networks:
                network.to(self.device)
        self._is_off_device = False

    def sigmas(self, job: VideoJob) -> tuple[float, ...]:
        return tuple(round(sigma, 6) for sigma in self.schedule(job).sigmas[:-1])

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        return (job.prompt, job.negative_prompt) if self.has_guidance(job) else (job.prompt,)

    def notes(self, job: VideoJob) -> tuple[str, ...]:
        """Of its LoRAs, what the library does not apply."""
        found = ((one, self._left_out(lora_file(one.file))) for one in job.lora if one.file)
        return tuple(
            f"the LoRA {Path(one.file).name} also changes {len(names)} tensors that the library "
            f"leaves as they are, the first {names[0]}"
            for one, names in found
            if names
        )

    @torch.no_grad()
    def denoiser(
        self,
        job: VideoJob,
        embeddings: Mapping[str, PromptEmbedding],
        start: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> VideoDenoiser:
        self._check(job)
        noise_1CFYX, schedule = self._noise(job), self.schedule(job)
        velocities = VelocityCache(job.step_cache, self.network_of(schedule))
        branches = RunningBranches(
            self.branch_runner(),
            inputs_of(job, self.texts(job), embeddings, dict(start)),
            velocities,
        )
        velocity = self.guided(job, schedule, branches)
        finish = partial(self.finished, start=start)
        return Denoiser(schedule, velocity, noise_1CFYX, self.networks, velocities, finish)

    @torch.no_grad()
    def branch(self, inputs: BranchInputs) -> Branch:
        self._bring_back()
        if inputs.job.lora or "adapters" in self.__dict__:
            # Layers come and go with the weights in main memory.
            self.place.release()
            self.adapters.use(inputs.job.lora)
        for network in self.networks:
            forget_step_cache(network)
        like = torch.empty(
            self._latents_shape(inputs.job), dtype=self.noise_dtype(), device=self.device
        )
        return self.new_branch(inputs, like)

    def schedule(self, job: VideoJob) -> JobScheduler:
        """A scheduler of the job's own."""
        return JobScheduler(
            self.layout.components["scheduler"],
            steps=job.num_inference_steps,
            flow_shift=job.flow_shift,
            device=self.device,
            is_linear=self.has_linear_sigmas,
            is_euler=job.scheduler == "euler",
        )

    def smaller_tilings(self, latents_BCFYX: Tensor) -> Iterator[tuple[DecodeTiles, TileRule]]:
        return smaller_tilings(self.vae.tiling, latents_BCFYX, self.tiles)

    @torch.no_grad()
    def decode_latents(
        self, latents_BCFYX: Tensor, tiling: TileRule | None = None
    ) -> Iterator[np.ndarray]:
        """Raises OutputError, a JobError, where the video is not finite."""
        refuse_infinite(latents_BCFYX)
        self.place.bring(self.vae.module)
        tiling = tiling or tiling_of(self.vae.tiling, self.tiles)
        return frames_by(self.decoder, self.vae.unscaled(latents_BCFYX), tiling)

    def _noise(self, job: VideoJob) -> Tensor:
        """Drawn on the CPU in the dtype that the pipeline draws in: another dtype, other noise."""
        noise: Tensor = randn_tensor(
            self._latents_shape(job),
            generator=torch.Generator().manual_seed(job.seed),
            device=self.device,
            dtype=self.noise_dtype(),
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
