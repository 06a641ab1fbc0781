"""Facts about a checkpoint without its weights: sizes, token counts, bytes, defaults."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from hyimg_cli.spec.job import ImageJob, Size, SizeRequest
from hyimg_cli.spec.options import Fit, JobOptions, PictureOptions, TextSampling, VideoOptions

# Bytes of a pixel in float32.
PICTURE_BYTES = 3 * 4
# For a size without a ratio token.
NO_RATIO = -1
# The longest shape in which a part of a photograph is drawn: longer ones are rare in training.
_MOST_CROP_RATIO = 2


def weight_width(dtype: str, quantization: str = "none") -> float:
    """Return the bytes of a weight in this form; in 4 bits, with its part of a scale."""
    return {"none": 4.0 if dtype == "float32" else 2.0, "fp8": 1.0, "nf4": 0.5625}[quantization]


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults(TextSampling, PictureOptions, JobOptions):
    """Sampling options in the checkpoint's own generation config, used if nothing else sets them.

    None: the model does not read it. `repetition_penalty` is set by the checkpoint, not by jobs.
    """

    repetition_penalty: float = 1.0


# Why a model takes no negative prompt.
GUIDES_AWAY = "it guides away from an empty prompt"
# For a model that writes no text.
NO_TEXT: dict[str, Any] = {
    "bot_task": "none", "drop_think": False, "use_system_prompt": "None",
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """One output size that the model knows: the ratio token's index, and pixels."""

    ratio_index: int
    size: Size

    @property
    def token_index(self) -> int | None:
        """The ratio token's index; None for a size without a token."""
        return None if self.ratio_index == NO_RATIO else self.ratio_index


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights by how they are stored.

    `experts` may be quantized, in matrices with `expert_rows` rows in all. `wide` are float32 in
    any case, and include the VAE's `encoder` and `decoder`.
    """

    experts: int = 0
    expert_rows: int = 0
    wide: int = 0
    rest: int = 0
    encoder: int = 0
    decoder: int = 0

    def nbytes(self, dtype: str, quantization: str) -> int:
        """Return the bytes once loaded: fp8 has a float32 scale per row, nf4 one per 64 weights."""
        rest = 4 * self.wide + self.rest * int(weight_width(dtype))
        return self.experts_nbytes(dtype, quantization) + rest

    def experts_nbytes(self, dtype: str, quantization: str) -> int:
        """Return the bytes of the experts alone, once loaded."""
        scales = 4 * self.expert_rows if quantization == "fp8" else 0
        return int(self.experts * weight_width(dtype, quantization)) + scales


@dataclass(frozen=True)
class Routing:
    """Routed experts: in each of `layers` layers, a token's row chooses some of them."""

    layers: int
    experts: int
    chosen: int

    def distinct(self, rows: int) -> float:
        """Return the average number of a layer's experts that this many rows choose at random."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)


@dataclass(frozen=True)
class Working:
    """Bytes at a forward's widest moment, in 16 bits: per row, and in addition to the rows."""

    row: int = 0
    fixed: int = 0


@dataclass(frozen=True)
class RankBytes:
    """Bytes of weights on rank 0 and on each other rank, and each rank's share of all K/V."""

    first: int
    other: int
    kv_share: float


@dataclass(frozen=True)
class PackedWeights:
    """Weights of a single file in few bits.

    `form`: GGUF, or fp8, which is unpacked as it is loaded. The others stay as stored: `numbers` of
    them in `nbytes`, and each matrix is unpacked in a forward, of `largest` numbers at most.
    """

    form: str
    numbers: int = 0
    nbytes: int = 0
    largest: int = 0


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks of a checkpoint in diffusers' layout, by component.

    `component_bytes`: weights as stored. `component_parameters`: their numbers, if the files are
    available to count. Encoders are the components that can be unloaded once everything is encoded.
    `has_float32_vae`: latents are decoded in float32, whatever dtype is asked for.
    `grouped_parameters`: numbers that are on the device at once if a component's blocks come one by
    one. `packed`: of a transformer in a single file.
    """

    component_bytes: tuple[tuple[str, int], ...]
    component_parameters: tuple[tuple[str, int], ...] = ()
    has_float32_vae: bool = False
    grouped_parameters: tuple[tuple[str, int], ...] = ()
    packed: PackedWeights | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all components, as stored."""
        return sum(size for _, size in self.component_bytes)

    def loaded_bytes(
        self, dtype: str, quantization: str = "none", *, in_groups: bool = False
    ) -> dict[str, int]:
        """Return each component's bytes once loaded in `dtype`, with quantized transformers.

        `in_groups`: while its blocks come one by one. As stored if nothing is counted. Released
        transformers are stored in float32, and take half of that in bfloat16. The few tensors that
        a class keeps in float32, or unquantized, count like the others. Blocks that come one by one
        are packed like the whole.
        """
        whole = dict(self.component_parameters)
        counts = whole | (dict(self.grouped_parameters) if in_groups else {})

        def of(name: str) -> float:
            if name == "vae" and self.has_float32_vae:
                return 4
            if name == "transformer" and self.packed is not None and self.packed.nbytes:
                plain = whole[name] - self.packed.numbers
                return (self.packed.nbytes + plain * weight_width(dtype)) / whole[name]
            return weight_width(dtype, quantization if name.startswith("transformer") else "none")

        return {
            name: int(counts[name] * of(name)) if name in counts else stored
            for name, stored in self.component_bytes
        }


@dataclass(frozen=True)
class ModelCard:
    """A checkpoint's facts.

    `buckets`: the sizes that a job may ask for. With a `size_multiple`, the sizes to which ratios
    lead; then any sides that are multiples of it, up to `base_size`, may be asked for.

    `networks`: of a model that `denoises_latents`, which has no text stage and takes any sides. Its
    jobs have a second branch if `guides` says so, unless it `is_distilled`. `reference_pixels`: of
    each source picture in every step; 0 means as many as the result has.

    `follows`: the options of jobs, and the fields of a line alone, that it reads, of those that not
    all models read; `reasons`: why not another one. `licence`: a short name; empty if unknown.
    `made_as`: which file of weights it is, and as what it draws.

    `fewest_images` and `most_images`: limits on the source pictures that the model sees; see
    `most_sources`. `size_by_source`: set if
    an edit in its source's shape has another size than the nearest of the buckets; by the side of a
    square of the same area, and the source's size. `edit_sides`: the sides of these squares, if
    edits have no other area. `keeps_small`: sources that are smaller than the model's square are
    not enlarged. `fits_kept`: a kept source is brought to the size of its edit. `inpaints`: it can
    draw in a region only. `joins_jobs`: some of its jobs can share forwards. `edit_shape`: of an
    edit without a size: what the model chooses (then it reads `infer_align_image_size`), its
    `source`'s, or a `square`. `rewrites`: it has a prompt rewriter, a language model of its own.

    `base_size`: the side of the square whose area all sizes roughly have. `edit_defaults`: defaults
    of jobs with source images, if different. `has_graphs`: text may be decoded by CUDA graphs.
    `activations`: memory of a forward, on a CPU (`cpu`) or by the experts' quantization.
    `kv_bytes_per_token` counts keys and values of all `kv_layers`, and `row_bytes` a token's row in
    the network, both in bfloat16. `weight_bytes` is as stored. `vae_bytes_per_pixel`: what the VAE
    holds of a whole picture at its widest level, in either direction. `vae_chunk_bytes`: the
    maximum for a chunk of rows that it works on. `tile_pixels`: the side of its tiles in a tiled
    decode.
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
    follows: frozenset[str]
    latent_channels: int = 0
    row_bytes: int = 0
    kv_layers: int = 1
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
    made_as: str = ""
    guides: Callable[[ImageJob], bool] = lambda job: job.guidance_scale > 1
    reference_pixels: int | None = None
    fewest_images: int = 0
    most_images: int = 3
    size_by_source: Callable[[int, Size], Size] | None = None
    edit_sides: tuple[int, ...] = ()
    keeps_small: bool = False
    fits_kept: bool = False
    inpaints: bool = False
    joins_jobs: bool = True
    edit_shape: Literal["chosen", "source", "square"] = "chosen"
    rewrites: bool = False
    reasons: Mapping[str, str] = field(
        default_factory=lambda: {"negative_prompt": GUIDES_AWAY}, hash=False
    )

    @property
    def most_sources(self) -> int:
        """Return the maximum number of source pictures that a job can have.

        A model that sees none takes one, if it `inpaints`.
        """
        return self.most_images or int(self.inpaints)

    @property
    def denoises_latents(self) -> bool:
        """True if the model only denoises latents, without a text stage."""
        return self.networks is not None

    @property
    def draws_layers(self) -> bool:
        """True if a job's picture is a number of transparent layers."""
        return self.defaults.layers is not None

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of models that it is, as settings name their readers."""
        found = {"pictures", "latents" if self.denoises_latents else "text"}
        return frozenset(found | ({"batches"} if self.joins_jobs else set()))

    def branches(self, job: ImageJob) -> int:
        """Return the number of guidance branches in the job's steps."""
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
        """Return the bytes of the VAE's encoder and decoder once loaded."""
        return 4 * self.weights.encoder, 4 * self.weights.decoder

    def vae_bytes(self, pixels: int, device: str, *, in_tiles: bool = False) -> int:
        """Return the bytes of a picture in the VAE, on a kind of device, cpu or cuda.

        A chunk's tensors are at most as large as what is held of the whole. A CPU's library holds a
        second copy of each, in its own layout. In tiles, this applies to one tile; the picture and
        the tiles that wait, at most two rows of them, are added.
        """
        at_once = min(pixels, self.tile_pixels**2) if in_tiles and self.tile_pixels else pixels
        held = at_once * self.vae_bytes_per_pixel
        chunk = min(held, self.vae_chunk_bytes) * (2 if device == "cpu" else 1)
        return held + chunk + (2 * pixels * PICTURE_BYTES if in_tiles else 0)

    def nearest_bucket(self, height: int, width: int) -> Bucket:
        """Return the bucket with the closest height/width ratio; the first of equals (official
        rule).
        """
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
            # A model that denoises latents uses the library's own rule.
            side // step if self.denoises_latents else round(side * min(1.0, scale) / step)
            for side in (request.height, request.width)
        )
        return Bucket(NO_RATIO, Size(*(max(1, count) * step for count in counts)))

    def kept_size(self, source: Size) -> Size:
        """Return the size in which a kept source is drawn: the nearest to its shape."""
        if self.size_by_source is not None:
            return self.size_by_source(self.base_size, source)
        found = self.bucket_of(SizeRequest(source.height, source.width))
        assert found is not None, "a size was asked for"
        return found.size

    def crop_sizes(self, pixels: int | None = None) -> tuple[Size, ...]:
        """Return the sizes in which a part of a photograph can be drawn, from wide to tall.

        Of about `pixels`, by default the model's square; empty if it draws no such area. A source
        of such a size is drawn in it, and is not resized again on the way to the VAE.
        """
        side = self.base_size if pixels is None else round(math.sqrt(pixels))
        if side > self.base_size or (side < self.base_size and not self.keeps_small):
            return ()
        if self.size_by_source is None:
            sizes = (bucket.size for bucket in self.buckets)
            found = frozenset(one for one in sizes if self.kept_size(one) == one)
        else:
            found = _unresized(self.size_by_source, side, self.size_multiple)
        return tuple(sorted(filter(_is_compact, found), key=lambda one: one.height / one.width))

    def sees_unresized(self, size: Size) -> bool:
        """Return True if a source of this size reaches the VAE as it is, and is drawn in it."""
        if size in self.crop_sizes():
            return True
        is_small = self.keeps_small and size.height * size.width <= self.base_size**2
        bucket = self.bucket_of(SizeRequest(size.height, size.width))
        return is_small and bucket is not None and bucket.size == size

    def latent_grid(self, size: Size) -> tuple[int, int]:
        """Return the latent rows and columns of a picture of `size`."""
        return size.height // self.pixels_per_cell, size.width // self.pixels_per_cell


def _is_compact(size: Size) -> bool:
    shorter, longer = sorted((size.height, size.width))
    return longer <= _MOST_CROP_RATIO * shorter


@cache
def _unresized(rule: Callable[[int, Size], Size], side: int, step: int) -> frozenset[Size]:
    """Return sizes that a rule leaves alone: by the shorter side, the nearest to this square."""
    area, found = side**2, set[Size]()
    for rows in range(step, side + step + 1, step):
        columns = round(area / rows / step) * step
        longer = (Size(rows, columns + more * step) for more in range(-2, 3))
        kept = [one for one in longer if one.width >= rows and rule(side, one) == one]
        if kept:
            best = min(kept, key=lambda one: abs(one.height * one.width - area))
            found |= {best, Size(best.width, best.height)}
    return frozenset(found)


@dataclass(frozen=True, kw_only=True)
class VideoDefaults(VideoOptions, JobOptions):
    """Defaults of a video checkpoint, or its authors' defaults."""

    size: Size


@dataclass(frozen=True)
class TileRule:
    """How a VAE cuts latents for a tiled decode; the same along rows and columns.

    `tile` and `stride` in latent cells; `pixels` of one cell.
    """

    tile: int
    stride: int
    pixels: int

    def __post_init__(self) -> None:
        assert 0 < self.stride <= self.tile, "tiles cover the grid"


@dataclass(frozen=True)
class ForwardWork:
    """The cost of one forward of a video's transformer, in floating-point operations.

    A multiplication with its addition counts as two. The cost has a part for each token of
    `cells_per_token` latent cells, and one for each pair of tokens; text is not included.
    `token_bytes`: activations of a token at the forward's widest moment, in 16 bits.
    """

    cells_per_token: int = 1
    per_token: int = 0
    per_pair: int = 0
    token_bytes: int = 0

    def flops(self, grid: tuple[int, int, int]) -> int:
        """Return the operations for latents with this many frames, rows and columns."""
        tokens = math.prod(grid) // self.cells_per_token
        return tokens * self.per_token + tokens**2 * self.per_pair


@dataclass(frozen=True)
class DecodeWork:
    """Bytes that a VAE's decode needs, in 16 bits.

    One value is per pixel of a frame that it decodes at once, the other per pixel of all frames.
    One of them is 0: a VAE decodes frame by frame, or all frames at once.
    """

    per_pixel: int = 0
    per_frame_pixel: int = 0


@dataclass(frozen=True)
class StartRule:
    """How a checkpoint starts from pictures: how many, and how its authors fit them.

    A second picture is the last frame. The video's size is the nearest of `sizes`, or the largest
    in the picture's shape with at most `area` pixels, rounded down to `multiple`. With neither, its
    area is the default size's.
    """

    fewest: int
    most: int
    fit: Fit
    sizes: tuple[Size, ...] = ()
    area: int = 0
    multiple: int = 16

    def size_for(self, picture: Size) -> Size | None:
        """Return the size for a picture's shape; None if the default size's area decides."""
        ratio = picture.height / picture.width
        if self.area:
            # NOTE: first the ratio, in doubles, as published: for 832x480 and its own area the
            # height is 479.99999999999994, and so 464.
            sides = (math.sqrt(self.area * ratio), math.sqrt(self.area / ratio))
            return Size(*(max(1, int(side // self.multiple)) * self.multiple for side in sides))
        # The nearest ratio, towards the square. Source: get_closest_ratio of HunyuanVideo-1.5's
        # release.
        ratios = [(round(size.height / size.width, 5) - ratio, size) for size in self.sizes]
        inner = [(off, size) for off, size in ratios if (off <= 0 if ratio >= 1 else off >= 0)]
        return min(inner, key=lambda found: abs(found[0]))[1] if inner else None


@dataclass(frozen=True)
class ChunkRule:
    """How a causal checkpoint makes a video: chunks of `frames` latent frames.

    Each chunk attends to the K/V of earlier chunks. Every chunk but the last needs one more pass to
    write its own K/V. Bytes are per token in bfloat16: `kv_bytes` of keys and values, `live_bytes`
    held for a token of the current chunk; `fixed_bytes` for the whole video.
    """

    frames: int
    kv_bytes: int
    live_bytes: int = 0
    fixed_bytes: int = 0

    def passes(self, latent_frames: int, levels: int) -> int:
        """Return the forwards of a video with this many noise levels."""
        return latent_frames // self.frames * (levels + 1) - 1


@dataclass(frozen=True)
class VideoCard(Networks):
    """A video checkpoint's facts, read from its JSON files alone.

    `start`: how it starts from pictures; None if it cannot. `needs_start`: it must start from one.

    Sizes must be multiples of `size_multiple` pixels; frames are `frame_stride * k + 1`.
    `max_prompt_tokens`: where the main text encoder cuts the prompt. `guides_below_one`: a guidance
    scale under 1 also runs both branches; otherwise it means no guidance. `chunks`: of a causal
    checkpoint; None if all frames are denoised together. `wants_negative`: its authors always guide
    with a long negative prompt. `cleaner`: the package that repairs prompts, if installed, as in
    its authors' pipeline. `is_distilled`: to few steps. `text_bytes`: activations of its text
    encoders for a text, in 16 bits. `context_heads`: attention heads by which ranks can share the
    tokens of a forward; 0 if they cannot. `follows` and `reasons`: see `ModelCard`.
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
    follows: frozenset[str]
    guides_below_one: bool = True
    forward: ForwardWork = ForwardWork()
    start: StartRule | None = None
    needs_start: bool = False
    chunks: ChunkRule | None = None
    wants_negative: bool = False
    cleaner: str = ""
    decode: DecodeWork = DecodeWork()
    text_bytes: int = 0
    is_distilled: bool = False
    context_heads: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def has_camera(self) -> bool:
        """True if its videos follow a camera path."""
        return "camera" in self.follows

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of models that it is, as settings name their readers."""
        return frozenset({"videos", "latents", *(["camera"] if self.has_camera else [])})

    def latent_grid(self, size: Size, num_frames: int) -> tuple[int, int, int]:
        """Return the latent frames, rows and columns of a video."""
        frames = (num_frames - 1) // self.frame_stride + 1
        return frames, size.height // self.pixels_per_cell, size.width // self.pixels_per_cell
