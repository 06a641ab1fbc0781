"""A model that writes text and draws with the same weights and one KV cache, in parts.

What is known before weights are loaded is in `family.py`.
A family offers these methods, some of them from `common.model.DecoderModel`, and
`pipelines/image/stages.py` tells one job's story with them.
"""

# Legend: C channel, Y X latent rows and columns, V vocabulary, M model width, G branch, R row
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import Track
from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.kv.segments import Segment
from hyimg_cli.spec.card import Bucket, ModelCard
from hyimg_cli.spec.job import ImageJob


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
    buffer: Buffer | None
    hidden_M: Tensor | None
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

    latents_CYX: Tensor
    step: Step
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


class TextScript(Protocol):
    """Rules of what may be written next, and when it is done. Made for one job.

    `opening`: the ids at the end of the prompt that belong to the written text: its trigger tag.
    """

    @property
    def opening(self) -> Sequence[int]: ...

    def allowed(self, last: int) -> tuple[int, ...] | None: ...

    def is_done(self, last: int) -> bool: ...

    def early_end(self, id_: int) -> str: ...

    def is_open(self, written: list[int]) -> bool: ...

    def forced_ending(self, written: list[int], before: int | None = None) -> list[int]: ...

    def text_of(self, written: list[int]) -> list[int]: ...


class TextGraphs(Protocol):
    """CUDA graphs of decode steps."""

    def prepare(self, rows: int) -> int:
        """Have the graphs of every number up to `rows`; how many were captured for it."""

    def degraded(self, rows: int) -> str:
        """A note on steps of up to `rows` rows that have no graph; empty where nothing failed."""


@runtime_checkable
class RoundTrips(Protocol):
    """What a family may offer beside `Pixels`: what its codec alone loses is no edit then."""

    def round_trip(self, pixels: np.ndarray, digest: str) -> np.ndarray:
        """A picture in one of the model's sizes, uint8 [H, W, 3], encoded and decoded again."""


@runtime_checkable
class BranchSets(Protocol):
    """Models over ranks, of which each guidance branch may have its own."""

    @property
    def branch_sets(self) -> int:
        """Sets of ranks that have all layers each."""

    def new_branch_buffer(self, capacity: int, number: int) -> Buffer:
        """An empty buffer in the memory of the one set that has the branch of that number."""

    def prefill_branches(
        self, prefills: Sequence[tuple[Any, Sequence[int], Sequence[Encoded], Buffer, int]]
    ) -> None:
        """`prefill` of each, its arguments, on the ranks that have its buffer, all at once."""


class MixedModel(Protocol):
    """An AR + diffusion model with one sequence. Methods raise JobError for what a job asks
    wrongly.
    """

    # --- facts of what is loaded

    @property
    def card(self) -> ModelCard: ...

    @property
    def device_name(self) -> str: ...

    @property
    def layer_devices(self) -> Sequence[torch.device]:
        """Where each layer, and its part of a buffer, lives."""

    @property
    def dtype_name(self) -> str: ...

    @property
    def parameter_count(self) -> int: ...

    @property
    def rows_seen(self) -> int:
        """Token rows that entered the transformer since it was loaded."""

    def memo_counts(self) -> dict[str, dict[str, int]]:
        """By kind, hits and misses of what the model keeps in memory, since its making."""

    # --- source images as rows, latents as pixels

    def encode_source(self, pixels: np.ndarray, digest: str) -> Encoded:
        """Rows of a source image, RGB uint8 [H, W, 3]."""

    def encode_stretched(self, pixels: np.ndarray, digest: str) -> Encoded:
        """The same of an image that is resized to the model's size without cutting."""

    def pack_source(self, encoded: Encoded) -> bytes:
        """An encoded source image as bytes that any process can keep."""

    def unpack_source(self, data: bytes, digest: str) -> Encoded:
        """Undo `pack_source`, on the model's device. Raises ValueError for other
        bytes.
        """

    def decode_latents(self, latents_CYX: Tensor) -> Tensor:
        """Pixels in [0, 1], float32 on the CPU, [H, W, 3]."""

    # --- the AR stage: a prompt, and the text behind it token by token

    def opening(self, job: ImageJob, sources: Sequence[Encoded]) -> TextPrompt | None:
        """The prompt of the AR stage; None where it has nothing to write or to decide."""

    def script(self, job: ImageJob) -> TextScript:
        """The rules of what the job's AR stage may write."""

    def text_budget(self, job: ImageJob, context: Context) -> int:
        """Number of tokens the job may write."""

    def feed(self, runs: Sequence[tuple[Context, Sequence[int] | Tensor]]) -> None:
        """Append tokens to each context's buffer, in one forward; ids may be on the device [T].
        Runs of one context stand one behind another.

        `context.ids` is the caller's to keep: ids on the device are not known here.
        """

    def text_logits(self, contexts: Sequence[Context]) -> Tensor:
        """Logits behind each context's last token, float32 on the device, [R, V]; the caller's to
        change.
        """

    def decode_text(self, ids: Sequence[int]) -> str:
        """The text of some ids, tags spelled out."""

    def ending(self, context: Context) -> tuple[int, ...]:
        """Ids decided behind the prompt of a job that writes no text; waits for the device."""

    @property
    def graphs(self) -> TextGraphs | None:
        """What decodes text by CUDA graphs, or computes it as they would; None where nothing."""

    # --- the diffusion stage: branches on a shared prefix, and their velocities

    def canvas(self, job: ImageJob, sources: Sequence[Encoded], text: GeneratedText) -> Canvas:
        """The picture to draw, once the text is there."""

    # `layout` is what the family's own `canvas` or `opening` gave.
    def segments(
        self, layout: Any, ids: Sequence[int], sources: Sequence[Encoded], stop: int
    ) -> list[Segment]:
        """`ids[:stop]` of a layout as the units in which prefixes are shared."""

    def new_buffer(self, capacity: int) -> Buffer: ...

    @property
    def lends_prefixes(self) -> bool:
        """True if branches may lie in one another's buffers; see `Buffer.lend`."""

    def prefill(
        self,
        layout: Any,
        ids: Sequence[int],
        sources: Sequence[Encoded],
        buffer: Buffer,
        stop: int,
    ) -> Tensor:
        """Complete the buffer's prefix up to `stop`; the last row's hidden state [M]."""

    def branch(self, layout: Any, buffer: Buffer) -> Any:
        """A branch ready to denoise."""

    def track(self, job: ImageJob, canvas: Canvas, branches: int) -> Track:
        """The job's noise, its steps, and how so many branches' velocities become one."""

    def velocities(self, pictures: Sequence[LivePicture]) -> list[Tensor]:
        """Every picture's branches, [G, C, Y, X] each, in one forward."""
