"""Types passed between the engine and a loaded model that writes text and draws; no torch.

The model itself is `common.model.DecoderModel`. Facts known before weights are loaded are in
`family.py`.
"""

# Legend: C channel, Y X latent rows and columns, M model width
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hyimg_cli.spec.card import Bucket

if TYPE_CHECKING:
    from torch import Tensor

    from hyimg_cli.diffusion.schedule import Step
    from hyimg_cli.kv.buffer import Buffer


@dataclass(frozen=True)
class Encoded:
    """An encoded source image.

    `shape` and `rows` are the family's own; `notes` say how it was fitted, `warnings` what failed.
    """

    digest: str
    shape: Any
    rows: Any
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass
class Context:
    """The AR stage's sequence: its ids, their K/V, the last row's hidden state [M].

    `buffer` is None if a job needs nothing from the AR stage. `layout`: the prompt's, from which a
    family derives rope positions of later text.
    """

    ids: list[int]
    buffer: "Buffer | None"
    hidden_M: "Tensor | None"
    layout: Any = None


@dataclass(frozen=True)
class TextPrompt:
    """The AR stage's prompt, and the rows that prompt and text need.

    `layout`: the family's own; it begins with `ids`.
    """

    ids: Sequence[int]
    capacity: int
    layout: Any = None


class Prefill(NamedTuple):
    """The rows of `ids[:stop]` that a buffer lacks, at least one; `layout`: the family's own.

    `sources`: encoded, or in a network their rows.
    """

    layout: Any
    ids: Sequence[int]
    sources: Sequence[Any]
    buffer: "Buffer"
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.buffer.length


@dataclass(frozen=True)
class DenoiseInput:
    """One picture at one denoise step."""

    latents_CYX: "Tensor"
    step: "Step"
    guidance: float
    branches: Sequence[Any]


@dataclass(frozen=True)
class GeneratedText:
    """The AR stage's result: the text, its ids with tags, and the ids after it.

    Ids are None if there was nothing to write. The family reads the ids after the text (a size, for
    example). `cut`: why the text ended before its closing tag, or empty.
    """

    ids: tuple[int, ...] | None = None
    text: str | None = None
    cut: str = ""
    ending: tuple[int, ...] = ()


@dataclass(frozen=True)
class BranchSequence:
    """One guidance branch's tokens; each denoise step computes `[live_start, live_stop)` again.

    Rope positions come from the family's own `layout`, never from a length; equal ids of one canvas
    have equal layouts.
    """

    ids: tuple[int, ...]
    live_start: int
    live_stop: int
    layout: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Canvas:
    """A picture to draw: its size, and the branches' sequences, the conditional one first.

    `notes` and `warnings` go into the job's line.
    """

    bucket: Bucket
    branches: tuple[BranchSequence, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


Finish = Literal["stop", "length", "picture"]


class Answer(NamedTuple):
    """The answer of an i2t or t2t job, without what it `thought` before, and how it ended.

    `finish`: the model ended it, it reached its limit, or the model began a picture. `warnings`:
    what somebody should look at.
    """

    text: str
    ids: tuple[int, ...]
    finish: Finish = "stop"
    thought: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass
class TextScript:
    """Rules for the next token of one job's text, and for its end.

    Families derive theirs from this class, which allows anything up to the token `end`. `opening`:
    ids at the end of the prompt that belong to the text: its trigger tag.
    """

    opening: Sequence[int]
    end: int

    def allowed(self, last: int) -> tuple[int, ...] | None:
        """Return the ids to choose the best from after `last`; None if sampling is free."""
        return None

    def is_done(self, last: int) -> bool:
        """Return True if the text ends with `last`, an allowed id."""
        return last == self.end

    def early_end(self, id_: int) -> str:
        """Return why the text ends before `id_`, which was sampled freely, or an empty string."""
        return ""

    def is_open(self, written: list[int]) -> bool:
        """Return True if the last closing tag is missing."""
        return self.end not in written

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]:
        """Return `written` with its ending at the token limit, or `before` a sampled token.

        Its first item is the trigger tag.
        """
        return [*written, self.end]

    def text_of(self, written: list[int]) -> list[int]:
        """Return the text's ids with its tags, without the ids that open the picture."""
        return written

    def recaption(self, ids: Sequence[int]) -> int | None:
        """Return where a text's description of its picture begins; None if it has none."""
        return None
