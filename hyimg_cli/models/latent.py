"""A model that denoises latents and nothing else: encode what the jobs give, denoise, decode.

Everything that one job leaves behind lives in its `LatentDenoiser`, which is made anew for each
job, so no job can be hurt by the one before. Videos and editors of pictures add their decode.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_video.weights import LoadTarget

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True)
class PromptEmbedding:
    """One string, or view of a picture, as the transformer reads it: named tensors on the CPU,
    valid tokens only.

    A negative prompt is embedded like a positive one. Read-only. `notes` and `warnings` go into the
    job's line: notes of what reads no picture (that it was cut) as warnings, too.
    """

    key: str
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class ConditionEncoder(Protocol[Item]):
    """Encoders of a checkpoint, of strings or of views of pictures; no weight is read before the
    first `encode`.
    """

    def key(self, item: Item, /) -> str:
        """A digest of everything that shapes the embedding; needs no encoder weights in memory."""

    def encode(self, item: Item, /) -> PromptEmbedding:
        """The embedding, computed under no_grad; loads the encoders that it really needs."""

    def pack(self, embedding: PromptEmbedding) -> bytes:
        """An embedding as bytes that any process can keep (safetensors)."""

    def unpack(self, data: bytes, key: str) -> PromptEmbedding:
        """Undo `pack`. Raises ValueError for other bytes."""

    def release(self) -> None:
        """Free the encoders' memory; a later `encode` loads them again."""

    @property
    def encoder_runs(self) -> Mapping[str, int]:
        """Count how often each encoder ran since the checkpoint was opened."""


class LatentDenoiser(Protocol):
    """One job's denoising: its own scheduler, guider and step cache (`velocities`), its constants
    hoisted.
    """

    velocities: VelocityCache

    @property
    def steps(self) -> int: ...

    def is_stop(self, step: int) -> bool:
        """True if the latents behind so many steps are worth keeping, whatever was asked for: never
        where all frames are on their way together.
        """
        return False

    def initial_latents(self) -> Tensor:
        """Noise from a CPU generator of the job's seed, a row a job, on the device."""

    def step(self, index: int, latents: Tensor, /) -> Tensor:
        """The latents after denoise step `index` (from 0). No host read of device values."""

    def state(self) -> Mapping[str, Tensor]:
        """Memory of the scheduler and the step cache between steps, for a checkpoint."""

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Stand behind step `index - 1` as `state` was taken there."""


class LatentModel(ABC):
    """A loaded checkpoint: its networks are read at their first use, or when it is asked. Methods
    raise JobError for what a job asks wrongly.

    `place`: where they work; `parameter_count`: of every component, loaded or not.
    """

    card: Any
    place: "LoadTarget"
    parameter_count: int

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return self.place.dtype_name

    @property
    @abstractmethod
    def encoders(self) -> Mapping[str, ConditionEncoder[Any]]:
        """By kind of the disk cache, in the order in which they are asked; no weight is read."""

    @abstractmethod
    def conditions(self, job: Any, digests: Sequence[str]) -> Mapping[Any, str]:
        """What is encoded for a job, each with its encoder's kind; `digests`: of its pictures'
        files.
        """

    @abstractmethod
    def denoiser(self, job: Any, embeddings: Mapping[Any, PromptEmbedding]) -> LatentDenoiser:
        """A fresh denoiser of a job; `embeddings` of its conditions."""

    def notes(self, job: Any) -> tuple[str, ...]:
        """What the job's line is to tell of its inputs, prompts and pictures apart."""
        return ()

    @abstractmethod
    def load_decoder(self) -> None:
        """Read the VAE now."""

    @abstractmethod
    def load_weights(self) -> None:
        """Read the transformer and the VAE now; without it, the first job does."""
