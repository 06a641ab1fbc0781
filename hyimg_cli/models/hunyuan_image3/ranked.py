"""A network whose layers are spread over ranks: rank 0 leads, the others compute what it asks.

    rank 0   prompts, embeddings, rope, heads, ViT, VAE; its share of the layers and of K/V
    rank r   its share of the layers and of K/V: a forward at a time, told by a message

    message  what was done to buffers since the last forward; which rows of which are new
    group    the rows that enter [T, M] and their angles, from rank 0; two sums a layer, among the
             ranks that share the layers

Ranks may be several sets, each with all layers and all K/V: CFG parallel. What fills K/V, every set
computes; a denoise step's branches are dealt out among the sets, whose first ranks give rank 0 what
came out. Live rows are written and read in the same forward: no set needs another's.

Nothing above the network knows of ranks: its transformer is another one, and so are its buffers.

A rank that runs out of memory in a forward takes part in its sums to the end, with zeros: so all
ranks end it, none waits for another, and each has the buffers and slices that it had. What the
forward wrote is void on every rank; it lies behind each buffer's length, where rows are written
before they are read. Rank 0 then raises torch.OutOfMemoryError, as one process would.
"""

# Legend: T new token, M model width, D head width
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.kernels.attention import AttentionChoice
from hyimg_cli.kernels.rows import padding
from hyimg_cli.kv.mirror import Change, FollowerKV, Mirror, MirroredBuffer
from hyimg_cli.models.hunyuan_image3.attention import QueryBlock, QuerySpan
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.rope import Rope
from hyimg_cli.models.hunyuan_image3.sharded import sums_of
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.models.hunyuan_image3.weights import load_share
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.parallel.tensor import Share, Sums, spread
from hyimg_cli.spec.run import CacheConfig, Quantization

PART = "layers"
T = TypeVar("T")
Compute = Callable[[Tensor, Rope, Sequence[QueryBlock]], Tensor]


@dataclass(frozen=True)
class Span:
    """A query block by its buffer's number."""

    buffer: int
    start: int
    stop: int
    pieces: tuple[QuerySpan, ...]


@dataclass(frozen=True)
class Forward:
    """One forward as the ranks are told: what comes before it, its rows, and what will arrive.

    `is_dealt`: each set of ranks computes its part of the spans, which have as many rows each.
    """

    changes: tuple[Change, ...]
    spans: tuple[Span, ...]
    rows: tuple[int, ...]
    dtype: torch.dtype
    angles: tuple[int, ...]
    row_multiple: int
    is_dealt: bool


@dataclass(frozen=True)
class Sets:
    """Ranks that lie one behind another: `count` sets of `size`, each of which has all layers."""

    size: int
    count: int = 1

    @property
    def ranks(self) -> int:
        return self.size * self.count

    def first(self, rank: int) -> int:
        """The first rank of the set that has `rank`."""
        return rank // self.size * self.size

    def dealt(self, spans: int, rows: int, first: int) -> tuple[slice, slice]:
        """Which of the spans, and of their rows, are the set's that begins with rank `first`."""
        own = Share(first // self.size, self.count).of_length(spans)
        each = rows // spans
        return own, slice(own.start * each, own.stop * each)


class LayersFollower:
    """A rank above 0: its layers, and its parts of the buffers."""

    def __init__(self, network: HunyuanImage3ForCausalMM, sets: Sets) -> None:
        self.sets = sets
        self.layers: Transformer = network.model
        self.sums = sums_of(self.layers)
        self.kv = FollowerKV(network.new_buffer, network.layer_devices)

    def compute(self, forward: Forward, spans: Sequence[Span], x_TM: Tensor, rope: Rope) -> Tensor:
        """Make rank 0's changes since the last forward, then this rank's part of one."""
        self.kv.change(forward.changes)
        query_blocks = [
            QueryBlock(self.kv.buffer(s.buffer), s.start, s.stop, s.pieces) for s in spans
        ]
        self.layers.row_multiple = forward.row_multiple
        return self.layers(x_TM, rope, query_blocks) if spans else x_TM


@torch.no_grad()
def follow(rank: Rank, forward: Forward) -> str | None:
    """Task of ranks 1, 2, ..: one forward beside rank 0's. What to tell where memory was short."""
    follower: LayersFollower = rank.parts[PART]
    # Without these a rank cannot take part at all: no memory for them ends it, and the task.
    x_TM = torch.empty(forward.rows, dtype=forward.dtype, device=rank.device)
    angles_2TD = torch.empty(forward.angles, device=rank.device)
    sets, rope = follower.sets, Rope(*angles_2TD.unbind())
    spread(x_TM, sets.ranks)
    spread(angles_2TD, sets.ranks)
    spans, first = forward.spans, sets.first(rank.number)
    if forward.is_dealt:
        own, rows = sets.dealt(len(spans), len(x_TM), first)
        spans, x_TM, rope = spans[own], x_TM[rows], rope.cut(rows.start, rows.stop)
    compute = partial(follower.compute, forward, spans, x_TM, rope)
    hidden_TM, why = _computed(compute, follower.sums, x_TM, forward.row_multiple)
    if forward.is_dealt and spans and rank.number == first:
        # Without memory for them these are other rows, and nobody looks at them.
        dist.send(x_TM if hidden_TM is None else hidden_TM.contiguous(), 0)
    return why


def _computed(
    compute: Callable[[], T], sums: Sums, x_TM: Tensor, row_multiple: int
) -> tuple[T | None, str | None]:
    """Result of `compute`, or why there was no memory for it: all sums are made in either case."""
    sums.begin()
    try:
        return compute(), None
    except torch.OutOfMemoryError as error:
        why = str(error).split("\n")[0]
    # Out here the frames are gone that held what the forward had made.
    if x_TM.device.type == "cuda":
        torch.cuda.empty_cache()
    rows, width = x_TM.shape
    if rows:
        sums.give_up((rows + padding(rows, row_multiple), width), x_TM.dtype, x_TM.device)
    return None, why


class Leader:
    """Rank 0's side: asks the first ranks of a pool for each forward; notes what they hold.

    When they end, whatever was made before is void.
    """

    def __init__(self, pool: RankPool, sets: Sets, sums: Sums) -> None:
        self._pool, self._sets, self._sums = pool, sets, sums
        self.mirror = Mirror()
        pool.stopped.append(self.mirror.lose)

    def ask(
        self,
        x_TM: Tensor,
        rope: Rope,
        query_blocks: Sequence[QueryBlock],
        row_multiple: int,
        own: Compute,
        *,
        is_dealt: bool = False,
    ) -> Tensor:
        """`own` of rank 0's rows, with the others computing beside it; `is_dealt`: of its part of
        the query blocks, and theirs behind it. Raises torch.OutOfMemoryError where any of them had
        no memory for it; RankError where one dies or fails, or where a buffer was made before one
        did.
        """
        is_dealt = is_dealt and self._sets.count > 1
        spans = tuple(
            Span(self.mirror.require(each.buffer), each.start, each.stop, each.pieces)
            for each in query_blocks
        )
        angles_2TD = torch.stack([rope.cos_TD, rope.sin_TD])
        forward = Forward(
            self.mirror.drained(),
            spans,
            tuple(x_TM.shape),
            x_TM.dtype,
            tuple(angles_2TD.shape),
            row_multiple,
            is_dealt,
        )
        entering_TM = x_TM.contiguous()
        lead = partial(self._led, forward, entering_TM, angles_2TD, query_blocks, own)
        work = partial(self._dealt, lead, entering_TM, len(spans)) if is_dealt else lead
        (hidden_TM, why), *others = self._pool.run(
            follow, forward, ranks=self._sets.ranks, own=work
        )
        short = [f"rank {n}: {told}" for n, told in enumerate([why, *others]) if told is not None]
        if short:
            raise torch.OutOfMemoryError("; ".join(short))
        assert hidden_TM is not None, "rank 0 had memory for it"
        return cast(Tensor, hidden_TM)

    def _led(
        self,
        forward: Forward,
        x_TM: Tensor,
        angles_2TD: Tensor,
        query_blocks: Sequence[QueryBlock],
        own: Compute,
        part: tuple[slice, slice] = (slice(None), slice(None)),
    ) -> tuple[Tensor | None, str | None]:
        """Rank 0's side of a forward: of `part` of the query blocks and their rows."""
        spread(x_TM, self._sets.ranks)
        spread(angles_2TD, self._sets.ranks)
        blocks, rows = part
        rope = Rope(*angles_2TD[:, rows].unbind())
        compute = partial(own, x_TM[rows], rope, query_blocks[blocks])
        return _computed(compute, self._sums, x_TM[rows], forward.row_multiple)

    def _dealt(
        self, lead: Callable[..., tuple[Tensor | None, str | None]], x_TM: Tensor, spans: int
    ) -> tuple[Tensor | None, str | None]:
        """The sets' rows one behind another, of which rank 0's set has what `lead` gives for its
        part: they arrive where the rows were that entered.
        """
        sets = self._sets
        first, *others = (
            sets.dealt(spans, len(x_TM), first) for first in range(0, sets.ranks, sets.size)
        )
        hidden_TM, why = lead(first)
        for number, (_, rows) in enumerate(others, 1):
            if len(x_TM[rows]):
                dist.recv(x_TM[rows], number * sets.size)
        if hidden_TM is None:
            return None, why
        x_TM[first[1]] = hidden_TM
        return x_TM, None


class LedTransformer(Transformer):
    """Rank 0's transformer: each forward is one of every rank."""

    def __init__(self, own: Transformer, leader: Leader) -> None:
        """Takes over the modules of `own`."""
        nn.Module.__init__(self)
        self.wte, self.layers, self.ln_f = own.wte, own.layers, own.ln_f
        self.rows_seen, self.row_multiple = own.rows_seen, own.row_multiple
        self.attend_rows = own.attend_rows
        self._leader = leader

    def forward(self, x_TM: Tensor, rope: Rope, query_blocks: Sequence[QueryBlock]) -> Tensor:
        return self._leader.ask(x_TM, rope, query_blocks, self.row_multiple, super().forward)

    def branches(self, x_TM: Tensor, rope: Rope, query_blocks: Sequence[QueryBlock]) -> Tensor:
        own = super().forward
        return self._leader.ask(x_TM, rope, query_blocks, self.row_multiple, own, is_dealt=True)


def load_ranked(
    folder: Path,
    pool: RankPool,
    ranks: int | None = None,
    *,
    branch_sets: int = 1,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    cache: CacheConfig | None = None,
    attention: AttentionChoice | None = None,
) -> HunyuanImage3ForCausalMM:
    """The network over the first `ranks` of a pool, or all; each reads its own share meanwhile.

    `branch_sets`: so many equal parts of the ranks have all layers each, and deal out the guidance
    branches. Raises what loading raises on any rank.
    """
    count = pool.size if ranks is None else ranks
    sets = Sets(count // branch_sets, branch_sets)
    share_of = partial(
        load_share,
        folder,
        dtype=dtype,
        quantization=quantization,
        cache=cache,
        attention=attention,
    )
    loaded: list[HunyuanImage3ForCausalMM] = []

    def own() -> None:
        loaded.append(share_of(Share(0, sets.size), pool.here.device))

    pool.load(PART, partial(_follower, share_of, sets), ranks=count, own=own)
    (network,) = loaded
    leader = Leader(pool, sets, sums_of(network.model))
    network.model = LedTransformer(network.model, leader)
    network.buffer_kind = partial(MirroredBuffer, leader.mirror)
    return network


def _follower(
    share_of: Callable[..., HunyuanImage3ForCausalMM], sets: Sets, rank: Rank
) -> LayersFollower:
    first = sets.first(rank.number)
    share = Share(rank.number - first, sets.size)
    return LayersFollower(share_of(share, rank.device, first=first), sets)
