"""Facts about a checkpoint that are known without its weights: sizes, token counts, bytes,
defaults.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import Fit, JobOptions, PictureOptions, TextSampling, VideoOptions

# Of a pixel in float32.
PICTURE_BYTES = 3 * 4
# Of a size that no ratio token stands for.
NO_RATIO = -1


def weight_width(dtype: str, quantization: str = "none") -> float:
    """Return the bytes of a weight in this form; in 4 bits, with its part of a scale."""
    return {"none": 4.0 if dtype == "float32" else 2.0, "fp8": 1.0, "nf4": 0.5625}[quantization]


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults(TextSampling, PictureOptions, JobOptions):
    """What the checkpoint's own generation config says of those options that neither line nor flag
    says. None: the model does not read it.

    `repetition_penalty` is set by the checkpoint, not by jobs. `has_negative_prompt`: of a model
    that reads one.
    """

    repetition_penalty: float = 1.0
    has_negative_prompt: bool = False


# Of a model that writes no text.
NO_TEXT: dict[str, Any] = {
    "bot_task": "none", "drop_think": False, "use_system_prompt": "None",
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """One output size the model knows: ratio token index and pixels."""

    ratio_index: int
    size: Size

    @property
    def token_index(self) -> int | None:
        """The ratio token's index; None for a size that no token stands for."""
        return None if self.ratio_index == NO_RATIO else self.ratio_index


@dataclass(frozen=True)
class WeightCounts:
    """Weights by how they are held. `experts` may be quantised, in matrices of `expert_rows` rows
    together; `wide` are float32 whatever the rest is, and the VAE's `encoder` and `decoder` are of
    them.
    """

    experts: int = 0
    expert_rows: int = 0
    wide: int = 0
    rest: int = 0
    encoder: int = 0
    decoder: int = 0

    def nbytes(self, dtype: str, quantization: str) -> int:
        """Bytes once loaded: fp8 has a float32 scale a row, nf4 one for 64 weights."""
        rest = 4 * self.wide + self.rest * int(weight_width(dtype))
        return self.experts_nbytes(dtype, quantization) + rest

    def experts_nbytes(self, dtype: str, quantization: str) -> int:
        """The same of the experts alone."""
        scales = 4 * self.expert_rows if quantization == "fp8" else 0
        return int(self.experts * weight_width(dtype, quantization)) + scales


@dataclass(frozen=True)
class Routing:
    """Routed experts: in each of so many layers a token's row chooses some of them."""

    layers: int
    experts: int
    chosen: int

    def distinct(self, rows: int) -> float:
        """Experts of a layer that so many rows choose, on average if they chose by chance."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)


@dataclass(frozen=True)
class Working:
    """Bytes at a forward's widest moment, in 16 bits: of each row, and beside the rows."""

    row: int = 0
    fixed: int = 0


@dataclass(frozen=True)
class RankBytes:
    """Bytes of weights on rank 0 and on each other, and which part of all K/V each rank has."""

    first: int
    other: int
    kv_share: float


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks of a checkpoint in diffusers' layout, by component: weights as stored in
    `component_bytes`, their numbers in `component_parameters` where the files are there to count.
    Encoders are those that can leave once everything is encoded.

    `has_float32_vae`: whatever the dtype asked for, latents are decoded in float32. `blocks`: of
    the transformer, which may come one by one, as `encoder_blocks` of the text encoder that has
    fewest may.
    """

    component_bytes: tuple[tuple[str, int], ...]
    component_parameters: tuple[tuple[str, int], ...] = ()
    has_float32_vae: bool = False
    blocks: int = 0
    encoder_blocks: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of all, as stored."""
        return sum(size for _, size in self.component_bytes)

    def loaded_bytes(self, dtype: str, quantization: str = "none") -> dict[str, int]:
        """Bytes of each component once loaded in `dtype`, transformers quantized; as stored where
        nothing is counted.

        Released transformers are stored in float32, and take half of that in bfloat16. The few
        tensors that a class keeps in float32, or as they are beside quantized ones, count like the
        others.
        """
        counts = dict(self.component_parameters)

        def of(name: str) -> float:
            if name == "vae" and self.has_float32_vae:
                return 4
            return weight_width(dtype, quantization if name.startswith("transformer") else "none")

        return {
            name: int(counts[name] * of(name)) if name in counts else stored
            for name, stored in self.component_bytes
        }


@dataclass(frozen=True)
class ModelCard:
    """A checkpoint's facts. `buckets` holds only the sizes that may be asked of it, or, where there
    is a `size_multiple`, those that ratios lead to: any sides of such multiples may be asked then,
    up to `base_size`.

    `networks`: of one that `denoises_latents`, which has no text stage and takes any sides. Its
    jobs have a second branch by `guides`, unless it `is_distilled`; with source pictures of
    `reference_pixels` each in every step, of 0 as many as the result has.

    `licence`: in a word, empty where nobody looked. `advise`: sentences that whoever gives a job
    should read.

    `fewest_images` and `most_images`: source pictures that a job may have. `size_by_source`: where
    an edit in its source's shape has another one than the nearest of those that may be asked for.

    `base_size` is the side of the square that all sizes have about the area of. `edit_defaults`:
    of jobs with source images, where they are others. `has_graphs`: text may be decoded by them.
    `activations`: what a forward works with on a CPU (`cpu`), else by its experts' quantization.
    `kv_bytes_per_token` counts keys and values of every layer, `row_bytes` a token's row in the
    network, both in bfloat16. `weight_bytes` is as stored. `vae_bytes_per_pixel` is what the VAE
    holds of a whole picture at its widest level in either direction, `vae_chunk_bytes` the most of
    a chunk of rows that it works on; `tile_pixels` is the side of the tiles in which it may decode.
    """

    model: str
    family: str
    name: str
    is_trained: bool
    is_distilled: bool
    buckets: tuple[Bucket, ...]
    pixels_per_cell: int
    source_vit_tokens: int
    kv_bytes_per_token: int
    weight_bytes: int
    max_positions: int
    vocab_size: int
    defaults: SamplingDefaults
    latent_channels: int = 0
    row_bytes: int = 0
    activations: Mapping[str, Working] = field(default_factory=dict, hash=False)
    weights: WeightCounts = WeightCounts()
    routing: Routing | None = None
    vae_bytes_per_pixel: int = 0
    vae_chunk_bytes: int = 0
    tile_pixels: int = 0
    base_size: int = 1024
    edit_defaults: SamplingDefaults | None = None
    size_multiple: int = 0
    has_graphs: bool = True
    networks: Networks | None = None
    licence: str = ""
    guides: Callable[[ImageJob], bool] = lambda job: job.guidance_scale > 1
    advise: Callable[[ImageJob], Sequence[str]] = lambda job: ()
    reference_pixels: int | None = None
    fewest_images: int = 0
    most_images: int = 3
    size_by_source: Callable[[Size], Size] | None = None

    @property
    def denoises_latents(self) -> bool:
        """True if it does nothing else."""
        return self.networks is not None

    def branches(self, job: ImageJob) -> int:
        """Guidance branches of the job's steps."""
        return 2 if self.guides(job) and not self.is_distilled else 1

    def loaded_bytes(
        self, dtype: str, quantization: str = "none", *, offloads_experts: bool = False
    ) -> int:
        """Return the bytes of all weights once loaded; where experts and the VAE wait elsewhere,
        of the others and of two layers' experts.
        """
        whole = self.weights.nbytes(dtype, quantization)
        if not offloads_experts or self.routing is None:
            return whole
        experts = self.weights.experts_nbytes(dtype, quantization)
        return whole - experts - sum(self.vae_halves) + 2 * -(-experts // self.routing.layers)

    @property
    def vae_halves(self) -> tuple[int, int]:
        """Bytes of the VAE's encoder and decoder once loaded."""
        return 4 * self.weights.encoder, 4 * self.weights.decoder

    def vae_bytes(self, pixels: int, device: str, *, in_tiles: bool = False) -> int:
        """Bytes of a picture in the VAE, on a kind of device, cpu or cuda.

        A chunk's tensors are at most as large as what is held of the whole. A CPU's library has a
        second one of each, in an order of its own. In tiles this is so of a tile; beside it are the
        picture and the tiles that wait, which are two rows of them at most.
        """
        at_once = min(pixels, self.tile_pixels**2) if in_tiles and self.tile_pixels else pixels
        held = at_once * self.vae_bytes_per_pixel
        chunk = min(held, self.vae_chunk_bytes) * (2 if device == "cpu" else 1)
        return held + chunk + (2 * pixels * PICTURE_BYTES if in_tiles else 0)

    def nearest_bucket(self, height: int, width: int) -> Bucket:
        """The bucket whose height/width ratio is closest; the first of equals (official rule)."""
        ratio = height / width
        return min(self.buckets, key=lambda b: abs(b.size.height / b.size.width - ratio))

    def bucket_of(self, request: SizeRequest) -> Bucket | None:
        """The bucket a request is given, or None where the model chooses (`auto`)."""
        if request.is_auto:
            return None
        if not self.size_multiple or request.is_ratio:
            return self.nearest_bucket(request.height, request.width)
        scale, step = self.base_size / max(request.height, request.width), self.size_multiple
        counts = (
            # Of one that denoises latents the library's own rule.
            side // step if self.denoises_latents else round(side * min(1.0, scale) / step)
            for side in (request.height, request.width)
        )
        return Bucket(NO_RATIO, Size(*(max(1, count) * step for count in counts)))

    def kept_size(self, source: Size) -> Size:
        """The size in which a source that is to be kept is drawn: the nearest to its shape."""
        if self.size_by_source is not None:
            return self.size_by_source(source)
        found = self.bucket_of(SizeRequest(source.height, source.width))
        assert found is not None, "a size was asked for"
        return found.size

    def latent_grid(self, size: Size) -> tuple[int, int]:
        """Latent rows and columns of a picture of `size`."""
        return size.height // self.pixels_per_cell, size.width // self.pixels_per_cell


@dataclass(frozen=True, kw_only=True)
class VideoDefaults(VideoOptions, JobOptions):
    """The same of a video checkpoint, or by its authors."""

    size: Size


@dataclass(frozen=True)
class TileRule:
    """How a VAE cuts latents for a tiled decode, along rows as along columns: `tile` and `stride`
    in latent cells, `pixels` of one cell.
    """

    tile: int
    stride: int
    pixels: int

    def __post_init__(self) -> None:
        assert 0 < self.stride <= self.tile, "tiles cover the grid"


@dataclass(frozen=True)
class ForwardWork:
    """The cost of one forward of a video's transformer, in floating-point operations (two for a
    multiplication and its addition): so many for each token of `cells_per_token` latent cells, and
    so many for each pair of them. Text is not in it. `token_bytes`: activations of a token at the
    forward's widest moment, in 16 bits.
    """

    cells_per_token: int = 1
    per_token: int = 0
    per_pair: int = 0
    token_bytes: int = 0

    def flops(self, grid: tuple[int, int, int]) -> int:
        """Of latents with so many frames, rows and columns."""
        tokens = math.prod(grid) // self.cells_per_token
        return tokens * self.per_token + tokens**2 * self.per_pair


@dataclass(frozen=True)
class DecodeWork:
    """Bytes that a VAE works with, in 16 bits: for each pixel of a frame that it decodes at once,
    and for each pixel of every frame. One of them is 0: of a VAE that goes frame by frame, or
    takes all frames at once.
    """

    per_pixel: int = 0
    per_frame_pixel: int = 0


@dataclass(frozen=True)
class StartRule:
    """How a checkpoint starts from pictures: how many it takes (the second is the last frame), and
    how its authors fit them. The video's size is the nearest of `sizes`, or the largest of `area`
    pixels at most in the picture's shape, rounded down to `multiple`; with neither of them, one of
    the default size's area.
    """

    fewest: int
    most: int
    fit: Fit
    sizes: tuple[Size, ...] = ()
    area: int = 0
    multiple: int = 16

    def size_for(self, picture: Size) -> Size | None:
        """The video's size for a picture's shape; None where the default size's area decides."""
        ratio = picture.height / picture.width
        if self.area:
            # NOTE: ratio first and in doubles, as it is published: 832x480 of its own area has a
            # height of 479.99999999999994, and so 464.
            sides = (math.sqrt(self.area * ratio), math.sqrt(self.area / ratio))
            return Size(*(max(1, int(side // self.multiple)) * self.multiple for side in sides))
        # The nearest in ratio, on the square's side of it. Source: get_closest_ratio of
        # HunyuanVideo-1.5's release.
        ratios = [(round(size.height / size.width, 5) - ratio, size) for size in self.sizes]
        inner = [(off, size) for off, size in ratios if (off <= 0 if ratio >= 1 else off >= 0)]
        return min(inner, key=lambda found: abs(found[0]))[1] if inner else None


@dataclass(frozen=True)
class ChunkRule:
    """How a causal checkpoint makes a video: `frames` latent frames at a time, each chunk over the
    K/V of those before it, and a pass more to leave its own, behind every chunk but the last.

    Bytes are those of a token in bfloat16: `kv_bytes` of keys and values, `live_bytes` of what is
    held for a token of the chunk at work; `fixed_bytes` for the whole video.
    """

    frames: int
    kv_bytes: int
    live_bytes: int = 0
    fixed_bytes: int = 0

    def passes(self, latent_frames: int, levels: int) -> int:
        """Forwards of a video with so many noise levels."""
        return latent_frames // self.frames * (levels + 1) - 1


@dataclass(frozen=True)
class VideoCard(Networks):
    """A video checkpoint's facts, read from its JSON files alone.

    `start`: how it starts from pictures, None where it cannot; `needs_start`: whether it must.

    Sizes must be multiples of `size_multiple` pixels; frames are `frame_stride * k + 1`.
    `max_prompt_tokens` is where the main text encoder cuts.
    `guides_below_one`: a guidance scale under 1 runs both branches too; otherwise it means none.
    `chunks`: of a causal checkpoint, None where all frames are denoised together. `has_camera`: its
    videos follow a camera's path.
    `wants_negative`: its authors never guide without a long negative
    prompt. `cleaner`: the package that mends prompts where it is there, as its authors' pipeline
    does it.
    `is_distilled`: to few steps. `context_heads`: of attention, where ranks can share the tokens of
    a forward; 0 where they cannot.
    """

    model: str
    family: str
    name: str
    is_trained: bool
    size_multiple: int
    pixels_per_cell: int
    frame_stride: int
    latent_channels: int
    max_prompt_tokens: int
    tiles: TileRule
    defaults: VideoDefaults
    guides_below_one: bool = True
    forward: ForwardWork = ForwardWork()
    start: StartRule | None = None
    needs_start: bool = False
    chunks: ChunkRule | None = None
    has_camera: bool = False
    wants_negative: bool = False
    cleaner: str = ""
    decode: DecodeWork = DecodeWork()
    is_distilled: bool = False
    context_heads: int = 0

    def latent_grid(self, size: Size, num_frames: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a video."""
        frames = (num_frames - 1) // self.frame_stride + 1
        return frames, size.height // self.pixels_per_cell, size.width // self.pixels_per_cell
