"""What passes between a loaded model that writes text and draws, and the engine; no torch.

The model itself is `common.model.DecoderModel`; what is known before weights are loaded is in
`family.py`.
"""

# Legend: C channel, Y X latent rows and columns, M model width
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hyimg_cli.spec.card import Bucket

if TYPE_CHECKING:
    from torch import Tensor

    from hyimg_cli.diffusion.schedule import Step
    from hyimg_cli.kv.buffer import Buffer


@dataclass(frozen=True)
class Encoded:
    """A source image as the network sees it. `shape` and `rows` are the family's own; `notes` are
    on how it was fitted, `warnings` on what failed on the way.
    """

    digest: str
    shape: Any
    rows: Any
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass
class Context:
    """The AR stage's sequence: ids that were fed, their K/V, the last row's hidden state [M].

    `buffer` is None where a job needs nothing of the AR stage. `layout`: the prompt's, which tells
    a family where text behind it stands in rope.
    """

    ids: list[int]
    buffer: "Buffer | None"
    hidden_M: "Tensor | None"
    layout: Any = None


@dataclass(frozen=True)
class TextPrompt:
    """The AR stage's prompt, and the rows that it and its text will need. `layout`: the family's
    own, which `ids` are the first tokens of.
    """

    ids: Sequence[int]
    capacity: int
    layout: Any = None


@dataclass(frozen=True)
class LivePicture:
    """One picture at one denoise step."""

    latents_CYX: "Tensor"
    step: "Step"
    guidance: float
    branches: Sequence[Any]


@dataclass(frozen=True)
class GeneratedText:
    """The AR stage's result: the text's ids with their tags (None: nothing to write), its text,
    and the ids that it put behind the text, which the family reads (a size, say). `cut`: why the
    text ended before its closing tag; empty where it did not.
    """

    ids: tuple[int, ...] | None = None
    text: str | None = None
    cut: str = ""
    ending: tuple[int, ...] = ()


@dataclass(frozen=True)
class BranchSequence:
    """One guidance branch's tokens, of which each denoise step computes `[live_start, live_stop)`
    anew. Rope positions are the layout's: no length here tells them. `layout`: the branch's own,
    where branches are laid out differently; equal ids of one canvas have equal layouts.
    """

    ids: tuple[int, ...]
    live_start: int
    live_stop: int
    layout: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Canvas:
    """A picture to be drawn: its size, the family's own layout, and the branches' sequences, the
    conditional one first. `notes` and `warnings` go into the job's line.
    """

    bucket: Bucket
    layout: Any
    branches: tuple[BranchSequence, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def layout_of(self, own: BranchSequence) -> Any:
        return self.layout if own.layout is None else own.layout


@dataclass
class TextScript:
    """Rules of what may be written next, and when it is done. Made for one job. A family's own one
    is made from it; as it is, it allows anything, up to the token `end` that ends a text.

    `opening`: the ids at the end of the prompt that belong to the written text: its trigger tag.
    """

    opening: Sequence[int]
    end: int

    def allowed(self, last: int) -> tuple[int, ...] | None:
        """Ids that may follow `last`, the best of them to be taken; None where sampling is free."""
        return None

    def is_done(self, last: int) -> bool:
        """True if nothing is to be written after `last`, which `allowed` has let through."""
        return last == self.end

    def early_end(self, id_: int) -> str:
        """Why the text ends before `id_`, which was sampled freely; empty where it goes on."""
        return ""

    def is_open(self, written: list[int]) -> bool:
        """True if the text still lacks its last closing tag."""
        return self.end not in written

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]:
        """`written`, ended at the token limit or `before` a sampled token; its first item is the
        trigger tag.
        """
        return [*written, self.end]

    def text_of(self, written: list[int]) -> list[int]:
        """The text's own ids, tags included: without what opens the picture."""
        return written


class TextGraphs(Protocol):
    """CUDA graphs of decode steps."""

    def prepare(self, rows: int) -> int:
        """Have the graphs of every number up to `rows`; how many were captured for it."""

    def degraded(self, rows: int) -> str:
        """A note on steps of up to `rows` rows that have no graph; empty where nothing failed."""
