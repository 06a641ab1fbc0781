"""Protocols of a video model: embed prompts and pictures, denoise latents, decode frames.

No base class: a family offers these methods. Everything that one job leaves behind lives in its
`VideoDenoiser`, which is made anew for each job, so no job can be hurt by the one before.
"""

# Legend: C channel, F latent frames, Y X latent rows and columns, H W pixels, T frames
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.settings.run import DecodeTiles
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import Size, VideoJob
from hyimg_cli.spec.options import Fit
from hyimg_cli.tiling.decode import TiledVae

# One guidance branch of one job: latents [1, C, F, Y, X] and timestep [1] to its velocity.
Branch = Callable[[Tensor, Tensor], Tensor]


ViewKind = Literal["tokens", "latents"]
TOKENS: ViewKind = "tokens"
LATENTS: ViewKind = "latents"


@dataclass(frozen=True)
class ImageConditioning:
    """One thing that a transformer reads of a job's start pictures: what an image encoder makes of
    them, or the VAE of frames of a size. `images`: path and sha256 of each; `size` and `fit` are
    None, `num_frames` 0 where they make no difference.
    """

    kind: ViewKind
    images: tuple[tuple[str, str], ...]
    size: Size | None
    fit: Fit | None
    num_frames: int = 0


Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True)
class PromptEmbedding:
    """One string, or view of a picture, as the transformer reads it: named tensors on the CPU,
    valid tokens only.

    A negative prompt is embedded like a positive one. Read-only. `notes` and `warnings` go into the
    job's line: notes of a prompt (that it was cut) as warnings, too.
    """

    key: str
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BranchInputs:
    """Inputs of a guidance branch: picklable, so that it can be made in another process.

    Branch 0 is the conditional one. `steps` are those that the branch is asked for, in turn.
    """

    job: VideoJob
    number: int
    embedding: PromptEmbedding
    steps: tuple[int, ...] = ()
    # Of its start pictures, by kind.
    start: Mapping[str, Tensor] = field(default_factory=dict)


class BranchRunner(Protocol):
    """Evaluates a job's branches, here or on ranks of their own: the same bits."""

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        """Make every branch of a job anew; what an earlier job left is forgotten."""

    def velocity(self, latents_BCFYX: Tensor, timestep_B: Tensor) -> Sequence[Tensor]:
        """Every branch's velocity at one step, in the order of `begin`."""


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


class PictureEncoder(ConditionEncoder[ImageConditioning], Protocol):
    """The encoders of start pictures; the VAE among them stays with the model."""

    def views(self, job: VideoJob, digests: Sequence[str]) -> tuple[ImageConditioning, ...]:
        """The job's pictures as the transformer reads them; `digests` are those of its files."""


PromptEncoder = ConditionEncoder[str]


class VideoDenoiser(Protocol):
    """One job's denoising: its own scheduler, guider and step cache, its constants hoisted."""

    @property
    def steps(self) -> int: ...

    @property
    def velocities(self) -> VelocityCache:
        """The job's own step cache."""

    def is_stop(self, step: int) -> bool:
        """True if the latents behind so many steps are worth keeping, whatever was asked for."""

    def initial_latents(self) -> Tensor:
        """Noise from a CPU generator of the job's seed, [1, C, F, Y, X], on the device."""

    def step(self, index: int, latents_BCFYX: Tensor) -> Tensor:
        """The latents after denoise step `index` (from 0). No host read of device values."""

    def state(self) -> Mapping[str, Tensor]:
        """Memory of the scheduler and the step cache between steps, for a checkpoint."""

    def restore(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Stand behind step `index - 1` as `state` was taken there."""


class LatentDecoder(Protocol):
    """Turns latents in the VAE's own scale into pixels."""

    def decode(self, latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        """Pixels in about -1..1, [B, 3, t, H, W], in pieces as they come; without `tiling`
        whole.
        """


class VideoVae(TiledVae, Protocol):
    """A VAE in the pieces that a tiled decode is made of."""

    @property
    def module(self) -> Any:
        """The library's autoencoder."""

    def stream(self, latents_BCFYX: Tensor) -> Iterator[Tensor]:
        """What `decode_tile` gives, in pieces as they come: one where it needs all frames."""

    def unscaled(self, latents_BCFYX: Tensor) -> Tensor:
        """A denoiser's latents in the VAE's scale and dtype, on its device."""

    def encoded(self, pixels_BCTHW: Tensor, *, is_tiled: bool) -> Tensor:
        """Frames in -1..1 as latents in the denoiser's scale."""


class LatentVideoModel(Protocol):
    """A video model. Methods raise JobError for what a job asks wrongly."""

    @property
    def card(self) -> VideoCard: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def device_name(self) -> str: ...

    @property
    def dtype_name(self) -> str: ...

    @property
    def parameter_count(self) -> int: ...

    @property
    def prompts(self) -> PromptEncoder: ...

    @property
    def vae(self) -> VideoVae:
        """Alone in memory where nothing else was asked for yet."""

    def load_weights(self) -> None:
        """Read the transformer and the VAE now; without it, the first job does."""

    def load_transformer(self) -> None:
        """Read the transformer alone: all that a branch needs."""

    def release_transformer(self) -> None:
        """Take the transformer off the device; the next job's branches bring it back."""

    def sigmas(self, job: VideoJob) -> tuple[float, ...]:
        """Noise levels that the job's steps begin at, from 1 down."""

    def texts(self, job: VideoJob) -> tuple[str, ...]:
        """The strings whose embeddings the job needs: its prompt, and under CFG the negative."""

    def notes(self, job: VideoJob) -> tuple[str, ...]:
        """What the job's line is to tell of its inputs, prompts and pictures apart."""

    @property
    def pictures(self) -> PictureEncoder:
        """The encoder of pictures that a job starts from."""

    def denoiser(
        self,
        job: VideoJob,
        embeddings: Mapping[str, PromptEmbedding],
        start: Mapping[str, Tensor] = ...,
    ) -> VideoDenoiser:
        """A fresh denoiser; `embeddings` by text, as `texts` names them, `start` by kind."""

    def smaller_tilings(self, latents_BCFYX: Tensor) -> Iterable[tuple[DecodeTiles, TileRule]]:
        """Tilings that cut the latents smaller than the model's decode does, largest tiles first;
        each with the word that asks for it.
        """

    def decode_latents(
        self, latents_BCFYX: Tensor, tiling: TileRule | None = None
    ) -> Iterator[np.ndarray]:
        """Frames in order, in pieces of RGB uint8 [T, H, W, 3] as they come; `tiling`: instead of
        the model's own, other pixels near borders of tiles. Raises JobError where not finite.
        """


class ClipsModel(LatentVideoModel, Protocol):
    """A video model that denoises several clips of one size, length and schedule together."""

    def denoiser_of(
        self, clips: Sequence[tuple[VideoJob, PromptEmbedding, Tensor]]
    ) -> VideoDenoiser:
        """Of clips, each with its text and its picture's latents; steps take [B, C, F, Y, X]."""


class SharedContext(Protocol):
    """A model's transformers as ranks share the tokens of a forward."""

    def split(self, ranks: int) -> None:
        """From here on a forward is one of all ranks; each calls this."""

    def whole(self) -> None:
        """Undo `split`."""

    def forget(self) -> None:
        """The ranks are gone: the next `split` is with others."""


class SpreadModel(LatentVideoModel, Protocol):
    """A video model whose guidance and decode can be spread over ranks: both may be replaced."""

    @property
    def context(self) -> SharedContext: ...

    branch_runner: Callable[[], BranchRunner]
    decoder: LatentDecoder

    def branch(self, inputs: BranchInputs) -> Branch:
        """One branch of one job, its constants computed and its step cache empty."""


# Asked of the class: asking a model whether it has a property would load what that gives.
def takes_clips(model: LatentVideoModel) -> TypeGuard[ClipsModel]:
    """True if several clips may be denoised together."""
    return hasattr(type(model), "denoiser_of")


def can_be_spread(model: LatentVideoModel) -> TypeGuard[SpreadModel]:
    """True if guidance and decode may be spread over ranks."""
    return hasattr(type(model), "branch")
