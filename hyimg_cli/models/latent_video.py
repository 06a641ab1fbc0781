"""A video model: a latent model that decodes frames, and may be spread over ranks."""

# Legend: C channel, F latent frames, Y X latent rows and columns, H W pixels, T frames
import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.cache.disk import PROMPT_EMBEDDINGS, START_PICTURES
from hyimg_cli.errors import OutputError
from hyimg_cli.models.latent import ConditionEncoder, LatentDenoiser, LatentModel, PromptEmbedding
from hyimg_cli.settings.run import DECODE_TILES, DecodeTiles, ModelChoice
from hyimg_cli.spec.card import TileRule, VideoCard
from hyimg_cli.spec.job import Size, VideoJob, View
from hyimg_cli.spec.options import Fit
from hyimg_cli.tiling.decode import decode_tiled
from hyimg_cli.tiling.tiles import halve_tiles, tile_plan

if TYPE_CHECKING:
    from hyimg_cli.models.diffusers_video.layout import CheckpointLayout
    from hyimg_cli.models.diffusers_video.networks import SplitTokens
    from hyimg_cli.models.diffusers_video.start import StartEncoder
    from hyimg_cli.models.diffusers_video.vaes import VideoVae
    from hyimg_cli.models.diffusers_video.weights import LoadTarget

PIECE_FRAMES = 8
# From latents in the VAE's own scale, whole or in tiles, to pixels in about -1..1, [B, 3, t, H, W],
# in pieces.
LatentDecoder = Callable[[Tensor, TileRule | None], Iterator[Tensor]]
# One guidance branch of one job: from step, latents [1, C, F, Y, X] and timestep [1] to its
# velocity.
Branch = Callable[[int, Tensor, Tensor], Tensor]


ViewKind = Literal["tokens", "latents"]
TOKENS: ViewKind = "tokens"
LATENTS: ViewKind = "latents"


@dataclass(frozen=True)
class ImageConditioning:
    """One condition that a transformer reads from a job's start pictures.

    It is the output of an image encoder, or of the VAE for frames of a size. `images`: view and
    digest of each. `size` and `fit` are None, and `num_frames` is 0, if they make no difference.
    """

    kind: ViewKind
    images: tuple[tuple[View, str], ...]
    size: Size | None
    fit: Fit | None
    num_frames: int = 0


@dataclass(frozen=True)
class BranchInputs:
    """Inputs of a guidance branch: picklable, so that it can be made in another process."""

    job: VideoJob
    embedding: PromptEmbedding
    # Conditions from its start pictures, by kind.
    start: Mapping[str, Tensor] = field(default_factory=dict)


class BranchRunner(Protocol):
    """Evaluates a job's branches, in this process or on ranks: the same bits."""

    def begin(self, inputs: Sequence[BranchInputs]) -> None:
        """Make every branch of a new job; an earlier job's branches are dropped."""

    def velocity(self, step: int, latents_BCFYX: Tensor, timestep_B: Tensor) -> Sequence[Tensor]:
        """Return every branch's velocity at a step, in the order of `begin`."""


class LatentVideoModel(LatentModel):
    """A video model. `decoder`, by default this process's, may be replaced from outside.

    `prompt_encoder`, `start_encoder` and `vae_class` are the family's own.
    """

    prompt_encoder: ClassVar[Callable[..., ConditionEncoder[str]]]
    start_encoder: ClassVar[Callable[..., "StartEncoder"]]
    vae_class: ClassVar[Callable[..., "VideoVae"]]
    # Whether a decode is cut into tiles if the settings do not say.
    is_tiled_by_default = False

    def __init__(
        self,
        card: VideoCard,
        layout: "CheckpointLayout",
        place: "LoadTarget",
        parameter_count: int,
        choice: ModelChoice,
    ) -> None:
        """Open the checkpoint. `parameter_count`: of every component, loaded or not.

        `choice`: how the transformer is held and run, and whether latents are decoded in tiles.
        """
        self.card, self.layout, self.place, self.choice = card, layout, place, choice
        is_cut = self.is_tiled_by_default and choice.tiles_videos and choice.decode_tiles == "auto"
        self.tiles: DecodeTiles = "own" if is_cut else choice.decode_tiles
        self.parameter_count = parameter_count
        self.decoder: LatentDecoder = self._decode_here

    def notes(self, job: VideoJob) -> tuple[str, ...]:
        return self.layout.notes

    @cached_property
    def prompts(self) -> ConditionEncoder[str]:
        """The text encoders; reads no weights."""
        return type(self).prompt_encoder(self.layout, self.place, self.card.max_prompt_tokens)

    @cached_property
    def pictures(self) -> "StartEncoder":
        """The encoder of start pictures; reads no weights."""
        is_tiled = self.is_tiled_by_default and self.choice.tiles_videos
        return type(self).start_encoder(
            self.layout, self._vae_place, lambda: self.vae, is_tiled=is_tiled
        )

    @cached_property
    def vae(self) -> "VideoVae":
        """The VAE, read now; alone in memory if nothing else has been requested."""
        from hyimg_cli.models.diffusers_video.weights import load_weights

        return type(self).vae_class(load_weights(self.layout.components["vae"], self._vae_place))

    @property
    def _vae_place(self) -> "LoadTarget":
        """Return the VAE's place: float32, in any transformer dtype, if the authors' examples say
        so.
        """
        return self.place.in_float32() if self.card.has_float32_vae else self.place

    @property
    @abstractmethod
    def networks(self) -> list[Any]:
        """The transformers, read now: one, or a high-noise and a low-noise one."""

    @abstractmethod
    def sigmas(self, job: VideoJob) -> tuple[float, ...]:
        """Return the noise levels at which the job's steps begin, from 1 down."""

    @abstractmethod
    def texts(self, job: VideoJob) -> tuple[str, ...]:
        """Return the strings whose embeddings the job needs: its prompt, and under CFG the
        negative.
        """

    @property
    def encoders(self) -> dict[str, ConditionEncoder[Any]]:
        found: dict[str, ConditionEncoder[Any]] = {PROMPT_EMBEDDINGS: self.prompts}
        return found if self.card.start is None else found | {START_PICTURES: self.pictures}

    def conditions(self, job: VideoJob, digests: Sequence[str]) -> dict[Any, str]:
        texts = dict.fromkeys(self.texts(job), PROMPT_EMBEDDINGS)
        return texts | dict.fromkeys(self.pictures.views(job, digests), START_PICTURES)

    def load_weights(self, *, with_transformer: bool = True) -> None:
        if with_transformer:
            self.load_transformer()
        _ = self.vae

    def load_transformer(self) -> None:
        """Read only the transformer: all that a branch needs."""
        _ = self.networks

    def unload_transformer(self) -> None:
        """Keep the transformer in main memory from now on; its next forward onloads it."""
        if self.device.type != "cpu":
            for network in self.__dict__.get("networks", ()):
                self.place.offload.keep(network)
        self.place.offload.unload()
        gc.collect()

    def smaller_tilings(self, latents_BCFYX: Tensor) -> Iterator[tuple[DecodeTiles, TileRule]]:
        """Yield tilings with smaller tiles than the model's decode uses, largest tiles first.

        Each with its setting's value.
        """
        for tiles in DECODE_TILES[DECODE_TILES.index(self.tiles) + 1 :]:
            tiling = self._tiling_of(tiles)
            if tiling and is_cut_by(tiling, latents_BCFYX):
                yield tiles, tiling

    def _tiling_of(self, tiles: DecodeTiles) -> TileRule | None:
        """Return the tiles for a setting's value; None for a whole decode."""
        own = self.vae.tiling
        return {"auto": None, "own": own, "half": halve_tiles(own)}[tiles]

    @torch.no_grad()
    def decode_latents(
        self, latents_BCFYX: Tensor, tiling: TileRule | None = None
    ) -> Iterator[np.ndarray]:
        """Yield frames in order, in pieces of RGB uint8 [T, H, W, 3].

        `tiling` replaces the model's own; pixels near tile borders differ. Raises OutputError, a
        JobError, if they are not finite.
        """
        # Checking frames is not enough: a VAE that clamps turns an infinity into a colour.
        if not bool(torch.isfinite(latents_BCFYX).all()):
            raise OutputError("the latents are not finite", code="output-video.not-finite")
        self.place.offload.onload(self.vae.module)
        tiling = tiling or self._tiling_of(self.tiles)
        decoded = self.decoder(self.vae.unscaled(latents_BCFYX), tiling)
        return chain.from_iterable(map(frames, decoded))

    def _decode_here(self, latents_BCFYX: Tensor, tiling: TileRule | None) -> Iterator[Tensor]:
        """Decode in tiles, two rows of them at a time, or whole.

        Whole means frame by frame if the VAE can do so; equal to the library's `decode` to the bit.
        """
        if tiling and is_cut_by(tiling, latents_BCFYX):
            yield decode_tiled(self.vae, latents_BCFYX, tiling)
        else:
            yield from map(self.vae.finish, self.vae.stream(latents_BCFYX))


def is_cut_by(tiling: TileRule, latents_BCFYX: Tensor) -> bool:
    """Return True if latents are more than one tile."""
    return len(tile_plan(tiling, *latents_BCFYX.shape[-2:]).tiles) > 1


def frames(pixels_BCTHW: Tensor) -> Iterator[np.ndarray]:
    """Return frames in -1..1 as pieces of RGB uint8 [T, H, W, 3]; B is 1.

    Rounded on the device, as the library's own image export does. All are checked before the first
    piece is made. Raises OutputError if a value is not finite.
    """
    lowest, highest = (bound.item() for bound in pixels_BCTHW.aminmax())
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise OutputError("the video is not finite", code="output-video.not-finite")

    def levels(pixels_CTHW: Tensor) -> np.ndarray:
        unit_THWC = (pixels_CTHW.permute(1, 2, 3, 0).float() * 0.5 + 0.5).clamp(0, 1)
        return unit_THWC.mul(255).round().to(torch.uint8).contiguous().cpu().numpy()

    return map(levels, pixels_BCTHW[0].split(PIECE_FRAMES, dim=1))


def start_of(embeddings: Mapping[Any, PromptEmbedding]) -> dict[str, Tensor]:
    """Return the conditions from a job's start pictures, by kind."""
    views = ((one, made) for one, made in embeddings.items() if isinstance(one, ImageConditioning))
    return {view.kind: made.tensors[view.kind] for view, made in views}


class ClipsModel(LatentVideoModel):
    """A video model that denoises several clips of one size, length and schedule together."""

    @abstractmethod
    def denoiser_of(
        self, clips: Sequence[tuple[VideoJob, Mapping[Any, PromptEmbedding]]]
    ) -> LatentDenoiser:
        """Return a denoiser of clips, with each one's embedded conditions.

        Its latents are [B, C, F, Y, X], and each clip can be resumed alone from its own.
        """


class SpreadModel(LatentVideoModel):
    """A video model whose guidance and decode can be spread over ranks.

    `branch_runner`, which evaluates a job's guidance branches, is called once a job; without it
    they are evaluated in this process.
    """

    branch_runner: Callable[[], BranchRunner] | None = None

    @property
    @abstractmethod
    def context(self) -> "SplitTokens":
        """Return the context in which ranks share the tokens of the transformers' forwards."""

    @abstractmethod
    def branch(self, inputs: BranchInputs) -> Branch:
        """Return one branch of one job, with its constants computed."""
