"""A network whose layers are spread over ranks: rank 0 leads, the others compute what it asks.

    rank 0   prompts, embeddings, rope, heads, ViT, VAE; its share of the layers and of K/V
    rank r   its share of the layers and of K/V: a forward at a time, told by a message

    message  what was done to buffers since the last forward; which rows of which are new
    group    the rows that enter [T, M] and their angles, from rank 0; two sums a layer, among the
             ranks that share the layers

Ranks may be several sets, each with all layers: CFG parallel. A text's context is in every set's
memory and every set computes it: what a picture's branches begin with is wanted by all. Behind it
each guidance branch has a set of its own (its buffer's home), which alone fills its K/V and runs
its denoise steps, all sets at once; their first ranks give rank 0 what came out. A branch without
another has no home: its K/V are everywhere, and such are dealt out in turn.

Nothing above the network knows of ranks: its transformer is another one, and so are its buffers.

A rank that runs out of memory in a forward takes part in its sums to the end, with zeros: so all
ranks end it, none waits for another, and each has the buffers and slices that it had. What the
forward wrote is void on every rank; it lies behind each buffer's length, where rows are written
before they are read. Rank 0 then raises torch.OutOfMemoryError, as one process would.
"""

# Legend: T new token, M model width, D head width; rope_2TD cosines, then sines
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.kernels.rows import padding
from hyimg_cli.kv.mirror import Change, FollowerKV, Mirror, MirroredBuffer
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.spans import QuerySpan
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.sharded import sums_of
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.parallel.tensor import Share, Sums, broadcast

PART = "layers"
T = TypeVar("T")
Load = Callable[..., HunyuanImage3ForCausalMM]


@dataclass(frozen=True)
class Forward:
    """One forward as the ranks are told: what comes before it, its rows, and what will arrive.

    `blocks`: each query block by its buffer's number, with its spans. `parts`: the set of ranks
    that computes each block, rising; empty where each computes all.
    """

    changes: tuple[Change, ...]
    blocks: tuple[tuple[int, tuple[QuerySpan, ...]], ...]
    rows: tuple[int, ...]
    dtype: torch.dtype
    angles: tuple[int, ...]
    row_multiple: int
    parts: tuple[int, ...]

    def own(self, number: int) -> tuple[slice, slice]:
        """Which of the blocks, and of their rows, a set of ranks computes."""
        if not self.parts:
            return slice(0, len(self.blocks)), slice(0, self.rows[0])
        blocks = slice(bisect_left(self.parts, number), bisect_right(self.parts, number))
        ends = [0, *accumulate(spans[-1].stop - spans[0].start for _, spans in self.blocks)]
        return blocks, slice(ends[blocks.start], ends[blocks.stop])


@dataclass(frozen=True)
class Sets:
    """Ranks that lie one behind another: `count` sets of `size`, each of which has all layers."""

    size: int
    count: int = 1

    @property
    def ranks(self) -> int:
        return self.size * self.count

    def of(self, rank: int) -> tuple[int, int]:
        """The number of the set that has `rank`, and that set's first rank."""
        number = rank // self.size
        return number, number * self.size

    def parts(self, query_blocks: Sequence[QueryBlock]) -> list[int]:
        """The set that computes each query block: the one that has its K/V, or in turn."""
        turn, parts = count(), []
        for block in query_blocks:
            assert isinstance(block.buffer, MirroredBuffer), "made by this network"
            home = block.buffer.home
            parts.append(next(turn) % self.count if home is None else home)
        return parts


class LayersFollower:
    """A rank above 0: its layers, and its parts of the buffers."""

    def __init__(self, network: HunyuanImage3ForCausalMM, sets: Sets, number: int) -> None:
        """`number`: its set's."""
        self.sets, self.number = sets, number
        self.layers: Transformer = network.model
        self.sums = sums_of(self.layers)
        self.kv = FollowerKV(network.new_buffer, network.layer_devices, number)

    def compute(self, forward: Forward, own: slice, x_TM: Tensor, rope_2TD: Tensor) -> Tensor:
        """Make rank 0's changes since the last forward, then this rank's part of one."""
        self.kv.change(forward.changes)
        blocks = [QueryBlock(self.kv.buffer(of), spans) for of, spans in forward.blocks[own]]
        self.layers.row_multiple = forward.row_multiple
        return self.layers(x_TM, rope_2TD, blocks) if blocks else x_TM


@torch.no_grad()
def follow(rank: Rank, forward: Forward) -> str | None:
    """Task of ranks 1, 2, ..: one forward beside rank 0's. What to tell where memory was short."""
    follower: LayersFollower = rank.parts[PART]
    # Without these a rank cannot take part at all: no memory for them ends it, and the task.
    x_TM = torch.empty(forward.rows, dtype=forward.dtype, device=rank.device)
    rope_2TD = torch.empty(forward.angles, device=rank.device)
    sets, number = follower.sets, follower.number
    broadcast(x_TM, sets.ranks)
    broadcast(rope_2TD, sets.ranks)
    own, rows = forward.own(number)
    x_TM = x_TM[rows]
    compute = partial(follower.compute, forward, own, x_TM, rope_2TD[:, rows])
    hidden_TM, why = _computed(compute, follower.sums, x_TM, forward.row_multiple)
    if forward.parts and forward.blocks[own] and sets.of(rank.number)[1] == rank.number:
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


def _in_order(rows: Tensor, counts: Sequence[int], order: Sequence[int], dim: int = 0) -> Tensor:
    """Runs of so many rows each, in another order; as they are where it is no other."""
    if list(order) == sorted(order):
        return rows
    runs = rows.split(list(counts), dim)
    return torch.cat([runs[place] for place in order], dim)


class LedTransformer(Transformer):
    """Rank 0's transformer: each forward is one of every rank. It notes what the others hold; when
    they end, whatever was made before is void.
    """

    def __init__(self, own: Transformer, pool: RankPool, sets: Sets) -> None:
        """Takes over the modules of `own`."""
        nn.Module.__init__(self)
        self.wte, self.layers, self.ln_f = own.wte, own.layers, own.ln_f
        self.rows_seen, self.row_multiple = own.rows_seen, own.row_multiple
        self._pool, self._sets, self._sums = pool, sets, sums_of(own)
        self.mirror = Mirror()
        pool.stopped.append(self.mirror.lose)

    def forward(self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]) -> Tensor:
        return self._led(x_TM, rope_2TD, query_blocks, is_dealt=False)

    def branches(
        self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]
    ) -> Tensor:
        return self._led(x_TM, rope_2TD, query_blocks, is_dealt=self._sets.count > 1)

    def _led(
        self,
        x_TM: Tensor,
        rope_2TD: Tensor,
        query_blocks: Sequence[QueryBlock],
        *,
        is_dealt: bool,
    ) -> Tensor:
        """The rows of rank 0, with the others computing beside it; `is_dealt`: of its part of the
        query blocks, and theirs behind it. Raises torch.OutOfMemoryError where any of them had no
        memory for it; RankError where one dies or fails, or where a buffer was made before one did.
        """
        own, sets = super().forward, self._sets
        parts: list[int] = []
        order = list(range(len(query_blocks)))
        if is_dealt:
            found = sets.parts(query_blocks)
            order.sort(key=found.__getitem__)
            parts = sorted(found)
        counts = [block.count for block in query_blocks]
        # Each set's rows stand together: all that is sent is a slice. Before any rank is told.
        entering_TM = _in_order(x_TM, counts, order).contiguous()
        rope_2TD = _in_order(rope_2TD, counts, order, dim=1).contiguous()
        query_blocks = [query_blocks[place] for place in order]
        blocks = tuple((self.mirror.require(b.buffer), tuple(b.spans)) for b in query_blocks)
        forward = Forward(
            self.mirror.drained(),
            blocks,
            tuple(x_TM.shape),
            x_TM.dtype,
            tuple(rope_2TD.shape),
            self.row_multiple,
            tuple(parts),
        )

        def lead() -> tuple[Tensor | None, str | None]:
            """Rank 0's side: its set's rows, and in their places what the first ranks of the other
            sets send of theirs.
            """
            broadcast(entering_TM, sets.ranks)
            broadcast(rope_2TD, sets.ranks)
            mine, rows = forward.own(0)
            own_TM = entering_TM[rows]
            compute = partial(own, own_TM, rope_2TD[:, rows], query_blocks[mine])
            hidden_TM, why = _computed(
                compute if query_blocks[mine] else lambda: own_TM,
                self._sums,
                own_TM,
                self.row_multiple,
            )
            for number in sorted({*parts} - {0}):
                dist.recv(entering_TM[forward.own(number)[1]], number * sets.size)
            if hidden_TM is None or not parts:
                return hidden_TM, why
            entering_TM[rows] = hidden_TM
            return entering_TM, None

        (hidden_TM, why), *others = self._pool.run(follow, forward, ranks=sets.ranks, own=lead)
        short = [f"rank {n}: {told}" for n, told in enumerate([why, *others]) if told is not None]
        if short:
            raise torch.OutOfMemoryError("; ".join(short))
        assert hidden_TM is not None, "rank 0 had memory for it"
        back = sorted(range(len(order)), key=order.__getitem__)
        return _in_order(cast(Tensor, hidden_TM), [counts[place] for place in order], back)


def load_ranked(
    share_of: Load, pool: RankPool, ranks: int | None = None, *, branch_sets: int = 1
) -> HunyuanImage3ForCausalMM:
    """The network over the first `ranks` of a pool, or all; each reads its own share meanwhile, by
    `share_of`: `weights.load`, given all but the share and its device.

    `branch_sets`: so many equal parts of the ranks have all layers each, and deal out the guidance
    branches. Raises what loading raises on any rank.
    """
    used = pool.size if ranks is None else ranks
    sets = Sets(used // branch_sets, branch_sets)
    loaded: list[HunyuanImage3ForCausalMM] = []

    def load_own() -> None:
        loaded.append(share_of(share=Share(0, sets.size), device_map=str(pool.here.device)))

    pool.load(PART, partial(_follower, share_of, sets), ranks=used, own=load_own)
    (network,) = loaded
    network.model = led = LedTransformer(network.model, pool, sets)
    network.buffer_kind = partial(MirroredBuffer, led.mirror)
    network.branch_sets = branch_sets
    return network


def _follower(share_of: Load, sets: Sets, rank: Rank) -> LayersFollower:
    number, first = sets.of(rank.number)
    share = Share(rank.number - first, sets.size)
    network = share_of(share=share, first=first, device_map=str(rank.device))
    return LayersFollower(network, sets, number)
