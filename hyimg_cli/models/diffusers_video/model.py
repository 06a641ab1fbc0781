"""A loaded video checkpoint for the engine, and one job's denoising.

A family is a subclass of `DiffusersVideo`; denoising is scheduler steps around guidance branches.
"""

# Legend: B batch, C channel, F latent frames, Y X latent rows and columns, T H W pixels
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.models.diffusers_video.lora import Adapters, lora_notes
from hyimg_cli.models.diffusers_video.networks import SplitTokens, load_network
from hyimg_cli.models.diffusers_video.scheduling import JobScheduler
from hyimg_cli.models.diffusers_video.start import StartEncoder
from hyimg_cli.models.latent import LatentDenoiser, PromptEmbedding
from hyimg_cli.models.latent_video import Branch, BranchInputs, BranchRunner, SpreadModel, start_of
from hyimg_cli.spec.job import VideoJob

# From the number of a step and its branches' velocities to the velocity that the step takes.
Guide = Callable[[int, Sequence[Tensor]], Tensor]


class LocalBranches:
    """The `BranchRunner` of one process: one branch after another."""

    def __init__(self, branch: Callable[[BranchInputs], Branch]) -> None:
        self._branch = branch
        self._branches: list[Branch] = []

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        self._branches = [self._branch(own) for own in inputs]

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> list[Tensor]:
        return [branch(step, latents_BCFYX, timestep_B) for branch in self._branches]


class BranchDenoiser(LatentDenoiser):
    """Denoising of both families. Made for one job; nothing of it outlives the job.

    Branches are begun with the first step that runs them. A step that the step cache estimates runs
    on no rank.
    """

    def __init__(
        self,
        model: "DiffusersVideo",
        job: VideoJob,
        embeddings: Mapping[Any, PromptEmbedding],
    ) -> None:
        self._model, self._start = model, start_of(embeddings)
        self._dtype: torch.dtype = model.networks[0].dtype
        self.schedule = model.schedule(job)
        self._guide = model.guide(job, self.schedule)
        # Drawn on the CPU in the pipeline's dtype, because another dtype gives other noise.
        noise_1CFYX: Tensor = randn_tensor(
            model.latents_shape(job),
            generator=torch.Generator().manual_seed(job.seed),
            device=model.device,
            dtype=model.noise_dtype or self._dtype,
        )
        network_of = model.network_of(self.schedule)
        super().__init__(noise_1CFYX, VelocityCache(job.step_cache, network_of))
        # A branch for each text: the conditional one, and under CFG the negative prompt's.
        self._inputs = [
            BranchInputs(job, embeddings[text], start=self._start) for text in model.texts(job)
        ]
        runner = model.branch_runner
        self._runner: BranchRunner = runner() if runner else LocalBranches(model.branch)
        self._is_begun = False

    @property
    def steps(self) -> int:
        return len(self.schedule.levels)

    @torch.no_grad()
    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        found: Sequence[Tensor]
        if self.velocities.steps[index]:
            if not self._is_begun:
                self._runner.begin(self._inputs)
                self._is_begun = True
            timestep_B = self.schedule.timesteps[index].expand(1)
            found = self._runner.velocity(index, latents_BCFYX.to(self._dtype), timestep_B)
            self.velocities.keep(index, found)
        else:
            found = self.velocities.estimate(index)
        moved = self.schedule.advance(index, self._guide(index, found), latents_BCFYX)
        return moved if index + 1 < self.steps else self._model.finished(moved, self._start)

    def state(self) -> Mapping[str, Tensor]:
        of_cache = super().state()
        return of_cache if self.is_done else {**self.schedule.state(), **of_cache}

    def restore(self, done: int, latents: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore a state. Raises ValueError if it was taken after another step."""
        self.schedule.restore(done, state)
        super().restore(done, latents, state)


class DiffusersVideo(SpreadModel):
    """A checkpoint whose networks and schedulers are the library's."""

    is_tiled_by_default, start_encoder = True, StartEncoder
    # Whether sigmas are a straight line instead of the scheduler's own spacing.
    has_linear_sigmas: bool
    # None: noise is drawn in the transformer's dtype.
    noise_dtype: torch.dtype | None = None

    def finished(self, latents_BCFYX: Tensor, start: Mapping[str, Tensor]) -> Tensor:
        """Return the last step's latents as they are decoded."""
        return latents_BCFYX

    def network_of(self, schedule: JobScheduler) -> list[int]:
        """Return the number of the network for each step."""
        return [0] * len(schedule.levels)

    @abstractmethod
    def has_guidance(self, job: VideoJob) -> bool:
        """True if the job needs its negative prompt."""

    @abstractmethod
    def guide(self, job: VideoJob, schedule: JobScheduler) -> Guide:
        """Return how a job's branches make the velocity of each of its steps."""

    @abstractmethod
    def new_branch(self, inputs: BranchInputs) -> Branch: ...

    def prepare(self, network: Any) -> None:
        """Adapt a newly read transformer to the family's forward."""

    @cached_property
    def networks(self) -> list[Any]:
        found = (self.layout.components.get(name) for name in ("transformer", "transformer_2"))
        return [load_network(part, self.place, self.choice, self.prepare) for part in found if part]

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRAs of the current job."""
        return Adapters(self.networks, self.layout, self.place.offload.unload)

    @cached_property
    def context(self) -> SplitTokens:
        """The context in which ranks share the transformers' tokens."""
        by_token = self.layout.expands_timesteps
        return SplitTokens(self.networks, self.device, by_token=by_token)

    def sigmas(self, job: VideoJob) -> tuple[float, ...]:
        return tuple(round(sigma, 6) for sigma in self.schedule(job).sigmas[:-1])

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        return (job.prompt, job.negative_prompt) if self.has_guidance(job) else (job.prompt,)

    def notes(self, job: VideoJob) -> tuple[str, ...]:
        """Return what of the checkpoint's options and of the LoRAs the library does not apply."""
        return (*super().notes(job), *lora_notes(job, self.layout))

    @torch.no_grad()
    def denoiser(self, job: VideoJob, embeddings: Mapping[Any, PromptEmbedding]) -> BranchDenoiser:
        return BranchDenoiser(self, job, embeddings)

    @torch.no_grad()
    def branch(self, inputs: BranchInputs) -> Branch:
        if inputs.job.lora or "adapters" in self.__dict__:
            self.adapters.use(inputs.job.lora)
        return self.new_branch(inputs)

    def schedule(self, job: VideoJob) -> JobScheduler:
        """Return a scheduler for the job alone."""
        return JobScheduler(
            self.layout.components["scheduler"], job, self.device, is_linear=self.has_linear_sigmas
        )

    def latents_shape(self, job: VideoJob) -> tuple[int, ...]:
        return 1, self.card.latent_channels, *self.card.latent_grid(job.size, job.num_frames)
