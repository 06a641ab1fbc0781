"""A model that only denoises latents: encode the jobs' inputs, denoise, decode.

All state of a job is in its `LatentDenoiser`, which is created for that job, so no job can affect
the next one. Videos and picture editors add their decode.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Denoiser
from hyimg_cli.models.common.packing import pack, unpack
from hyimg_cli.spec.job import ImageJob

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_video.weights import LoadTarget

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True)
class PromptEmbedding:
    """An encoded string, or view of a picture: named tensors on the CPU, valid tokens only.

    Read-only. Negative prompts are embedded like positive ones. `notes` and `warnings` go into the
    job's line; notes on a text without pictures (that it was cut) become warnings.
    """

    key: str
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rewritten:
    """A rewritten prompt and its number of tokens; `is_cut`: it ended at the limit of them.

    `notes`: on how its pictures were read.
    """

    text: str
    tokens: int
    notes: tuple[str, ...] = ()
    is_cut: bool = False


class Rewriter(Protocol):
    """A loaded prompt rewriter. `parameters`: their number."""

    device: str
    dtype: str
    parameters: int

    def rewrite(self, job: ImageJob, digests: Sequence[str]) -> Rewritten:
        """Return a job's prompt, rewritten; `digests`: of its sources as they are read."""


class ConditionEncoder(Protocol[Item]):
    """Encoders of a checkpoint, for strings or for views of pictures.

    The first `encode` loads the weights. `encoder_runs`: how often each has run since the
    checkpoint was opened.
    """

    encoder_runs: Counter[str]

    def key(self, item: Item, /) -> str:
        """Return a digest of all that affects the embedding; needs no encoder weights in memory."""

    def encode(self, item: Item, /) -> PromptEmbedding:
        """Compute the embedding under no_grad; loads only the encoders it needs."""

    def pack(self, embedding: PromptEmbedding) -> bytes:
        """Return an embedding as bytes for any process (safetensors)."""
        return pack(embedding.key, embedding.tensors, notes=embedding.notes)

    def unpack(self, data: bytes, key: str) -> PromptEmbedding:
        """Reverse `pack`. Raises ValueError for other bytes."""
        tensors, facts = unpack(data, key)
        return PromptEmbedding(key, tensors, tuple(facts["notes"]))

    def release(self) -> None:
        """Free the encoders' memory; a later `encode` loads them again."""


class LatentDenoiser(Denoiser):
    """The denoiser of a job, or of clips together, with constants computed once.

    It has its own scheduler and guider. `latents` have a row for each job.
    """

    def advance(self) -> None:
        """Take the next step. An exception leaves latents and `done` unchanged."""
        self.latents, self.done = self.step(self.done, self.latents), self.done + 1

    @abstractmethod
    def step(self, index: int, latents: Tensor, /) -> Tensor:
        """Return latents after denoise step `index` (from 0), without reading device values."""


class LatentModel(ABC):
    """An open checkpoint, whose networks are loaded at their first use or on request.

    Methods raise JobError for faults of a job. `place`: where networks work. `parameter_count`: of
    all components, loaded or not.
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

    def unload_networks(self) -> None:
        """Free the device of networks that take turns there; each comes back for its next turn."""
        self.place.offload.unload()

    @property
    @abstractmethod
    def encoders(self) -> Mapping[str, ConditionEncoder[Any]]:
        """Return encoders by kind of the disk cache, in order of use, without loading weights."""

    @abstractmethod
    def conditions(self, job: Any, digests: Sequence[str]) -> Mapping[Any, str]:
        """Return what is encoded for a job, with the kind of each item's encoder.

        `digests`: of its pictures as they are read.
        """

    @abstractmethod
    def denoiser(self, job: Any, embeddings: Mapping[Any, PromptEmbedding]) -> LatentDenoiser:
        """Return a new denoiser for a job; `embeddings`: of its conditions."""

    @property
    def own_notes(self) -> tuple[str, ...]:
        """Notes for the line of every job: how the model was put together."""
        return ()

    def notes(self, job: Any) -> tuple[str, ...]:
        """Return warnings for the job's line, other than the ones on prompts and pictures."""
        return ()

    @abstractmethod
    def load_weights(self, *, with_transformer: bool = True) -> None:
        """Load the VAE now, and the transformer, not with the first job."""
