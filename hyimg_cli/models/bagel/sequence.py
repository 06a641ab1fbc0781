"""Token sequences as blocks, and the size rule of pictures; no torch.

    text    bos ids eos                causal         consecutive rope ids
    vae     start latents end          full           one rope id for all of them
    vit     start patches end          full           one rope id
    noise   start latents end          full           one rope id; computed anew at every step

Every block sees all earlier blocks and no later one. So an image takes thousands of places in a K/V
buffer and one step of rope: the two are counted separately. Ids of image tokens are negative:
sequences with equal ids have equal blocks and positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

from hyimg_cli.kv.segments import Segment
from hyimg_cli.models.bagel.config import TOKEN_PIXELS, BagelShape, SizeLimits
from hyimg_cli.models.common.spans import Grid, QuerySpan, cut_segments, query_spans
from hyimg_cli.spec.job import Size

Kind: TypeAlias = Literal["text", "vae", "vit", "noise"]
PLACEHOLDER: dict[Kind, int] = {"vae": -1, "vit": -2, "noise": -3}
# For pictures of unknown size, where the largest counts.
UNREAD = Size(1, 1)


@dataclass(frozen=True)
class SourcePlace:
    """A source image's place. `size`: as resized; `vae_size`, `vit_size`: for the encoders."""

    size: Size
    vae_size: Size
    vit_size: Size
    vit: Grid

    @property
    def vae(self) -> Grid:
        return picture_grid(self.vae_size)


@dataclass(frozen=True)
class Block:
    """Tokens `[start, stop)`; `rope` is the position of the first, or of all tokens of an image."""

    kind: Kind
    start: int
    stop: int
    rope: int
    source: int
    grid: Grid

    @property
    def next_rope(self) -> int:
        return self.rope + (self.stop - self.start if self.kind == "text" else 1)

    def position(self, at: int) -> int:
        """Return the rope id of token `at`."""
        return self.rope + (at - self.start if self.kind == "text" else 0)


@dataclass(frozen=True)
class Markers:
    """Ids of the tokens around texts and images."""

    bos: int
    eos: int
    start: int
    end: int


@dataclass(frozen=True)
class BlockLayout:
    """A sequence of blocks; appending returns a longer one.

    Ids of all tokens; image tokens have placeholders.
    """

    markers: Markers
    ids: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()

    @property
    def length(self) -> int:
        """Return the place of the next token in a buffer."""
        return len(self.ids)

    @property
    def next_rope(self) -> int:
        """Return the place of the next token in rope."""
        return self.blocks[-1].next_rope if self.blocks else 0

    @cached_property
    def rope_shift(self) -> int:
        """Return length minus rope after the last block; text that follows keeps it."""
        return self.length - self.next_rope

    def text(self, ids: Sequence[int]) -> "BlockLayout":
        return self._add("text", (self.markers.bos, *ids, self.markers.eos))

    def opening(self) -> "BlockLayout":
        """Append the first token of a text that is not written yet."""
        return self._add("text", (self.markers.bos,))

    def source(self, shape: SourcePlace, number: int) -> "BlockLayout":
        """Append both blocks of a source image: its VAE tokens, then its ViT tokens."""
        return self._image("vae", shape.vae, number)._image("vit", shape.vit, number)

    def seen(self, shape: SourcePlace, number: int) -> "BlockLayout":
        """Append a source image as a question sees it: its ViT tokens alone."""
        return self._image("vit", shape.vit, number)

    def noise(self, grid: Grid) -> "BlockLayout":
        return self._image("noise", grid, 0)

    def _image(self, kind: Kind, grid: Grid, number: int) -> "BlockLayout":
        cells = (PLACEHOLDER[kind],) * grid.cells
        return self._add(kind, (self.markers.start, *cells, self.markers.end), number, grid)

    def _add(
        self, kind: Kind, ids: tuple[int, ...], source: int = 0, grid: Grid | None = None
    ) -> "BlockLayout":
        stop = self.length + len(ids)
        block = Block(kind, self.length, stop, self.next_rope, source, grid or Grid(0, 0))
        return BlockLayout(self.markers, self.ids + ids, (*self.blocks, block))

    def spans(self, start: int, stop: int) -> tuple[QuerySpan, ...]:
        """Return the mask of the tokens `[start, stop)`.

        The last token of a text is a run of its own: the same runs, and so the same bits, whether
        earlier tokens are computed here or were cached.
        """
        images = ((block.start, block.stop) for block in self.blocks if block.kind != "text")
        return query_spans(start, stop, images, (*(b.start for b in self.blocks), stop - 1))

    def positions(self, start: int, stop: int) -> list[int]:
        """Return the rope ids of the tokens `[start, stop)`."""
        inside = (block for block in self.blocks if block.start < stop and block.stop > start)
        return [
            block.position(at)
            for block in inside
            for at in range(max(start, block.start), min(stop, block.stop))
        ]


Part: TypeAlias = SourcePlace | Sequence[int]


@dataclass(frozen=True)
class Contexts:
    """The tokens before the noise that each guidance branch sees.

    `without_text` is a prefix of `full`: everything before the last text, unless an image follows
    it. `without_images` has only the texts, from rope 0, and no written text.
    """

    full: BlockLayout
    without_text: BlockLayout
    without_images: BlockLayout


def contexts(
    markers: Markers,
    parts: Sequence[Part],
    *,
    system: Sequence[int] | None = None,
    written: Sequence[int] | None = None,
) -> Contexts:
    """Return the contexts of a request: texts and images in order, after any `system` text.

    `written`: ids of the text written before the picture.
    """
    full = BlockLayout(markers)
    if system is not None:
        full = full.text(system)
    texts = without_text = full
    images = 0
    for part in parts:
        if isinstance(part, SourcePlace):
            full = without_text = full.source(part, images)
            images += 1
        else:
            without_text, full, texts = full, full.text(part), texts.text(part)
    return Contexts(full if written is None else full.text(written), without_text, texts)


def segments(
    layout: BlockLayout, ids: Sequence[int], digests: Sequence[str], stop: int
) -> list[Segment]:
    """Return the tokens `ids[:stop]` as segments: texts, and source images by digest."""
    pairs = [(vae, vit) for vae, vit in pairwise(layout.blocks) if vae.kind == "vae"]
    images: dict[int, tuple[str, tuple[Grid, ...]]] = {
        vae.start: (digests[vae.source], (vae.grid, vit.grid)) for vae, vit in pairs
    }
    paired = {vit.start for _, vit in pairs}
    alone = [one for one in layout.blocks if one.kind == "vit" and one.start not in paired]
    images |= {vit.start: (digests[vit.source], (vit.grid,)) for vit in alone}
    cuts = (block.start for block in layout.blocks if block.start not in paired)
    return cut_segments(ids, cuts, images, stop)


def fitted(size: Size, limits: SizeLimits, max_pixels: int) -> Size:
    """Return the size to which a picture is resized; the longest side has priority.

    Source: the published transform with its roundings, half to even. A picture of too many pixels
    is scaled by their ratio, not by its root.
    """
    scale = min(limits.max_size / max(size.height, size.width), 1.0)
    scale = max(scale, limits.min_size / min(size.height, size.width))
    found = _scaled(size, scale, limits.stride)
    if found.height * found.width > max_pixels:
        found = _scaled(found, max_pixels / (found.height * found.width), limits.stride)
    longest = max(found.height, found.width)
    if longest > limits.max_size:
        found = _scaled(found, limits.max_size / longest, limits.stride)
    return found


def _scaled(size: Size, scale: float, stride: int) -> Size:
    height, width = (
        max(stride, round(round(side * scale) / stride) * stride)
        for side in (size.height, size.width)
    )
    return Size(height, width)


def source_shape(size: Size, arch: BagelShape) -> SourcePlace:
    """Return the place of a picture of `size` pixels; an unread one counts as the largest."""
    if size == UNREAD:
        size = Size(arch.max_side, arch.max_side)
    first = fitted(size, arch.vae_limits, arch.max_pixels)
    # As published: the resized picture goes through both rules once more.
    vae, vit = (fitted(first, one, arch.max_pixels) for one in (arch.vae_limits, arch.vit_limits))
    patch = arch.vision.patch_size
    return SourcePlace(first, vae, vit, Grid(vit.height // patch, vit.width // patch))


def picture_grid(size: Size) -> Grid:
    """Return the grid of a picture's latent tokens."""
    return Grid(size.height // TOKEN_PIXELS, size.width // TOKEN_PIXELS)
