"""A network whose layers are spread over ranks: rank 0 leads, the others compute what it asks.

    rank 0   prompts, embeddings, rope, heads, ViT, VAE; its share of the layers and of K/V
    rank r   its share of the layers and of K/V: a forward at a time, told by a message

    message  what was done to buffers since the last forward; which rows of which are new
    group    the rows that enter [T, M] and their angles, from rank 0; two sums a layer, among all

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
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Span:
    """A query block by its buffer's number."""

    buffer: int
    start: int
    stop: int
    pieces: tuple[QuerySpan, ...]


@dataclass(frozen=True)
class Forward:
    """One forward as the ranks are told: what comes before it, its rows, and what will arrive."""

    changes: tuple[Change, ...]
    spans: tuple[Span, ...]
    rows: tuple[int, ...]
    dtype: torch.dtype
    angles: tuple[int, ...]
    row_multiple: int


class LayersFollower:
    """A rank above 0: its layers, and its parts of the buffers."""

    def __init__(self, network: HunyuanImage3ForCausalMM, ranks: int) -> None:
        self.ranks = ranks
        self.layers: Transformer = network.model
        self.sums = sums_of(self.layers)
        self.kv = FollowerKV(network.new_buffer, network.layer_devices)

    def compute(self, forward: Forward, x_TM: Tensor, angles_2TD: Tensor) -> None:
        """Make rank 0's changes since the last forward, then this rank's part of one."""
        self.kv.change(forward.changes)
        query_blocks = [
            QueryBlock(self.kv.buffer(s.buffer), s.start, s.stop, s.pieces) for s in forward.spans
        ]
        self.layers.row_multiple = forward.row_multiple
        self.layers(x_TM, Rope(*angles_2TD.unbind()), query_blocks)


@torch.no_grad()
def follow(rank: Rank, forward: Forward) -> str | None:
    """Task of ranks 1, 2, ..: one forward beside rank 0's. What to tell where memory was short."""
    follower: LayersFollower = rank.parts[PART]
    # Without these a rank cannot take part at all: no memory for them ends it, and the task.
    x_TM = torch.empty(forward.rows, dtype=forward.dtype, device=rank.device)
    angles_2TD = torch.empty(forward.angles, device=rank.device)
    spread(x_TM, follower.ranks)
    spread(angles_2TD, follower.ranks)
    compute = partial(follower.compute, forward, x_TM, angles_2TD)
    return _computed(compute, follower.sums, x_TM, forward.row_multiple)[1]


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
    sums.give_up((rows + padding(rows, row_multiple), width), x_TM.dtype, x_TM.device)
    return None, why


class Leader:
    """Rank 0's side: asks the first `ranks` of a pool for each forward; notes what they hold.

    When they end, whatever was made before is void.
    """

    def __init__(self, pool: RankPool, ranks: int, sums: Sums) -> None:
        self._pool, self._ranks, self._sums = pool, ranks, sums
        self.mirror = Mirror()
        pool.stopped.append(self.mirror.lose)

    def ask(
        self,
        x_TM: Tensor,
        rope: Rope,
        query_blocks: Sequence[QueryBlock],
        row_multiple: int,
        own: Callable[[], Tensor],
    ) -> Tensor:
        """`own()` with the others computing beside it. Raises torch.OutOfMemoryError where any of
        them had no memory for it; RankError where one dies or fails, or where a buffer was made
        before one did.
        """
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
        )
        lead = partial(self._led, x_TM.contiguous(), angles_2TD, row_multiple, own)
        (hidden_TM, why), *others = self._pool.run(follow, forward, ranks=self._ranks, own=lead)
        short = [f"rank {n}: {told}" for n, told in enumerate([why, *others]) if told is not None]
        if short:
            raise torch.OutOfMemoryError("; ".join(short))
        assert hidden_TM is not None, "rank 0 had memory for it"
        return cast(Tensor, hidden_TM)

    def _led(
        self, x_TM: Tensor, angles_2TD: Tensor, row_multiple: int, own: Callable[[], Tensor]
    ) -> tuple[Tensor | None, str | None]:
        spread(x_TM, self._ranks)
        spread(angles_2TD, self._ranks)
        return _computed(own, self._sums, x_TM, row_multiple)


class LedTransformer(Transformer):
    """Rank 0's transformer: each forward is one of every rank."""

    def __init__(self, own: Transformer, leader: Leader) -> None:
        """Takes over the modules of `own`."""
        nn.Module.__init__(self)
        self.wte, self.layers, self.ln_f = own.wte, own.layers, own.ln_f
        self.rows_seen, self.row_multiple = own.rows_seen, own.row_multiple
        self._leader = leader

    def forward(self, x_TM: Tensor, rope: Rope, query_blocks: Sequence[QueryBlock]) -> Tensor:
        own = partial(super().forward, x_TM, rope, query_blocks)
        return self._leader.ask(x_TM, rope, query_blocks, self.row_multiple, own)


def load_ranked(
    folder: Path,
    pool: RankPool,
    ranks: int | None = None,
    *,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    cache: CacheConfig | None = None,
) -> HunyuanImage3ForCausalMM:
    """The network over the first `ranks` of a pool, or all; each reads its own share meanwhile.

    Raises what loading raises on any rank.
    """
    count = pool.size if ranks is None else ranks
    share_of = partial(load_share, folder, dtype=dtype, quantization=quantization, cache=cache)
    loaded: list[HunyuanImage3ForCausalMM] = []

    def own() -> None:
        loaded.append(share_of(Share(0, count), pool.here.device))

    pool.load(PART, partial(_follower, share_of, count), ranks=count, own=own)
    (network,) = loaded
    leader = Leader(pool, count, sums_of(network.model))
    network.model = LedTransformer(network.model, leader)
    network.buffer_kind = partial(MirroredBuffer, leader.mirror)
    return network


def _follower(
    share_of: Callable[[Share, torch.device], HunyuanImage3ForCausalMM], ranks: int, rank: Rank
) -> LayersFollower:
    return LayersFollower(share_of(Share(rank.number, ranks), rank.device), ranks)
