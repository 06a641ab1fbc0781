"""What is known of one of the library's pipelines, and the sizes that it draws; no torch."""

import itertools
import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hyimg_cli.errors import SourceImageError
from hyimg_cli.media.images import view_size
from hyimg_cli.models.diffusers_image.canvas import Canvas, canvas_of
from hyimg_cli.models.diffusers_video.fitting import Rule
from hyimg_cli.spec.card import GUIDES_AWAY, ModelCard
from hyimg_cli.spec.job import ImageJob, Size
from hyimg_cli.spec.options import OF_STEPS

APACHE, NON_COMMERCIAL = "Apache-2.0", "non-commercial"
# Pictures with fewer pixels are far from what models are trained on.
SMALL = 512**2


@dataclass(frozen=True)
class LibraryPipeline:
    """One of the library's pipelines."""

    # Its modular blocks, its parts with their classes, and what must fit between them.
    blocks: str
    parts: dict[str, Set[str]]
    fits: tuple[Rule, ...]
    # Minimum and maximum number of source pictures that its network sees. One that sees none still
    # takes one, to inpaint it.
    fewest: int
    most: int
    # Defaults of its checkpoints' pages.
    steps: int
    guidance: float
    # Licence of its releases; empty if they differ.
    licence: str = APACHE
    # Default negative prompt; None: it takes none.
    negative: str | None = " "
    # Why it takes none, if it takes none.
    no_negative: str = GUIDES_AWAY
    # A larger scale adds a second branch.
    guides_above: float = 1.0
    # It has no guidance, whatever the scale.
    is_distilled: bool = False
    # Blocks that replace the library's: a name of `own_blocks.OWN_BLOCKS`.
    own_blocks: str = ""
    # Size and steps decide its shift, not the scheduler's configuration.
    has_own_shift: bool = False
    # A fixed schedule; jobs cannot change its number of steps.
    sigmas: tuple[float, ...] = ()
    # False: an edit has its source's shape, with sides rounded up.
    takes_size: bool = True
    # Transparent layers that a job draws over each other, by default; 0: one picture.
    layers: int = 0
    # The side of the square whose area results roughly have. Then those of the squares of all
    # areas that edits can have, if they always have their source's shape.
    base_size: int = 1024
    edit_sides: tuple[int, ...] = ()
    # Sides of results are multiples of it.
    multiple: int = 16
    # Sides of edits in their source's shape; 0: `multiple`. It is what the library brings
    # references to.
    fitted_multiple: int = 0
    # Those edits have at most the pixels of the model's square.
    is_bounded: bool = False
    # Sizes of those edits, width and height; empty: any.
    fitted_sizes: tuple[tuple[int, int], ...] = ()
    # A source that is kept is brought to the size of its edit; other kinds do that by themselves.
    fits_kept: bool = False
    # An edit without a size is a square, whatever the shape of its source.
    squares: bool = False
    # Limits of sources, and of texts with the pictures they see.
    least_side: int = 0
    most_ratio: int = 0
    # The shape is limited by the size of the square, in which no side may round to 0.
    narrows: bool = False
    most_rows: int = 1 << 20
    # By tokenizer, the tokens of a text that are read. The rest is ignored, or the job is refused.
    text_tokens: Mapping[str, int] = field(default_factory=dict)
    cuts_texts: bool = True
    # Inputs of its blocks that other kinds do not have. Then the ones that its encoders read: the
    # picture encoder's, and the text encoder's if it sees pictures.
    own_inputs: Callable[[ImageJob, ModelCard], dict[str, Any]] = lambda job, card: {}
    of_encoders: Set[str] = frozenset()
    # Those that a text encoder reads that sees no pictures.
    of_texts: Set[str] = frozenset()
    # Values of the index that its blocks have built in: a checkpoint with others is refused.
    built_in: Mapping[str, Any] = field(default_factory=dict)
    # Parts that its blocks make without files, with their configurations; values that its
    # transformer's configuration must have.
    built_in_parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    of_transformer: Mapping[str, Any] = field(default_factory=dict)
    # Layers of the text encoder that the blocks read, from the first one; 0: all.
    text_layers: int = 0
    # Activations of a text with the pictures that its encoder sees, in 16 bits, as traced.
    text_bytes: int = 280_000_000
    # The same of one row of a text, if it may have very many; 0: `text_bytes` counts.
    text_row_bytes: int = 0
    # A mask for inpainting is interpolated to one value for each row of the latents.
    smooths_masks: bool = False
    # The text encoder sees the source pictures.
    shows_pictures: bool = False
    # All sources are scaled to one area; otherwise only larger ones are.
    scales_pictures: bool = True
    # It reads the alpha of a source.
    reads_alpha: bool = False
    # An edit of one source without a size has its source's size: see `canvas`.
    keeps_whole: bool = False
    # Its authors want every prompt rewritten by a language model: see `rewriter`.
    rewrites: bool = False
    # Rows that depend on neither step nor noise: a name of `prefix.PREFIXES`.
    prefix: str = ""
    # How rows are counted, if not by the prefix: a name of `rows.COUNTS`.
    rows: str = ""

    @property
    def joins_branches(self) -> bool:
        """True if one forward computes both guidance branches."""
        return self.own_blocks == "joined branches"

    @property
    def follows(self) -> frozenset[str]:
        """Return the options of jobs that it reads."""
        is_read = {
            "guidance_scale": not self.is_distilled,
            "flow_shift": not self.has_own_shift,
            "negative_prompt": self.negative is not None,
            "layers": self.layers > 0,
            "lora": True,
            "infer_align_image_size": True,
        }
        unread = {name for name, is_so in is_read.items() if not is_so}
        return OF_STEPS.union(is_read) - unread

    def canvas(self, job: ImageJob) -> Canvas | None:
        """Return on what an edit in its source's size is drawn; None for other jobs.

        Also None for a source that cannot be read, or not yet.
        """
        if self.keeps_whole and len(job.views) == 1 and job.size.is_auto:
            with suppress(SourceImageError):
                return canvas_of(view_size(job.views[0]))
        return None

    def is_guided(self, job: ImageJob) -> bool:
        """Return True if the job's steps evaluate a second branch."""
        return not self.is_distilled and job.guidance_scale > self.guides_above


def size_by_source(kind: LibraryPipeline, base_size: int, source: Size) -> Size:
    """Return the size of about `base_size`² pixels with the source's shape.

    A reference of this size is not resized by the library.
    """
    # NOTE: computed in the library's order: another order may round to another multiple.
    ratio, step = source.width / source.height, kind.fitted_multiple or kind.multiple
    if kind.fitted_sizes and base_size**2 >= SMALL:
        nearest = min(kind.fitted_sizes, key=lambda one: abs(ratio - one[0] / one[1]))
        return Size(nearest[1], nearest[0])
    width = math.sqrt(base_size**2 * ratio)
    exact = (width / ratio / step, width / step)
    if not kind.is_bounded:
        rounded = round if kind.takes_size else math.ceil
        return Size(*(max(1, rounded(count)) * step for count in exact))
    steps = [(max(1, math.floor(count)), max(1, math.ceil(count))) for count in exact]
    sizes = [Size(rows * step, columns * step) for rows, columns in itertools.product(*steps)]
    within = [one for one in sizes if one.height * one.width <= base_size**2] or sizes[:1]
    return min(within, key=lambda one: abs(math.log(one.width / one.height / ratio)))
