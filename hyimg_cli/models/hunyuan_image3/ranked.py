"""A network whose layers are spread over ranks: rank 0 leads, the others compute.

    rank 0   prompts, embeddings, rope, heads, ViT, VAE; who holds which pages; its share of the
             layers and of K/V
    rank r   its share of the layers and of K/V

    message  of a forward: in which slots each block's rows are, and what changed before it
    group    the rows that enter [T, M] and their angles, from rank 0; two sums a layer, among the
             ranks that share the layers

Ranks may be several sets, each with all layers: CFG parallel. Every set computes a text's context,
because every branch of a picture begins with it. After it each guidance branch has its own set (its
buffer's home), which alone fills its K/V and runs its denoise steps, all sets at once; their first
ranks send the results to rank 0. A branch without another has no home: its K/V are everywhere, and
such branches are shared out in turn. A page has the same number everywhere.

Code above the network does not know of ranks: only its transformer and its arena differ.

A rank that runs out of memory in a forward takes part in its sums to the end, with zeros: so all
ranks end it, and none waits for another. Changes that it could not make come first in the next one.
The rows that the forward wrote are void on every rank; they are after each buffer's length, where
rows are written before they are read. Rank 0 then raises torch.OutOfMemoryError, as one process
would.
"""

# Legend: T new token, M model width, D head width; rope_2TD cosines, then sines
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.kernels.rows import padding
from hyimg_cli.kv.arena import Arena, Change, Runs, Span, Storage, page_rows
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.spans import QuerySpan
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.sharded import Share, sums_of
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.parallel.tensor import broadcast

PART = "layers"
Load = Callable[..., HunyuanImage3ForCausalMM]


class Block(NamedTuple):
    """A query block, as sent to the ranks; `home`: the set that computes it; None: every set."""

    spans: tuple[QuerySpan, ...]
    prefix: Runs
    kept: Runs | None
    home: int | None

    def on(self, storage: Storage) -> QueryBlock:
        """Return the block in a rank's storage."""
        kept = None if self.kept is None else Span(self.kept)
        return QueryBlock(self.spans, storage, Span(self.prefix), kept)


@dataclass(frozen=True)
class Forward:
    """One forward, as sent to the ranks; `changes`: of their storages, to be made before it."""

    blocks: tuple[Block, ...]
    row_multiple: int
    changes: tuple[Change, ...]

    def counts(self) -> list[int]:
        """Return the number of rows of each block."""
        return [spans[-1].stop - spans[0].start for spans, *_ in self.blocks]


@dataclass(frozen=True)
class RankLayers:
    """A rank's share of the layers; every `size` consecutive ranks of `ranks` are a set."""

    layers: Transformer
    storage: Storage
    rank: int
    ranks: int
    size: int
    # Changes that are still to be made.
    changes: deque[Change] = field(default_factory=deque)

    def compute(self, forward: Forward, x_TM: Tensor, rope_2TD: Tensor) -> str | None:
        """Replace the entering rows by the rows after the layers: all of them, or its set's.

        Returns why memory was short, or None; the rows are then invalid, and all sums are still
        made.
        """
        for entering in (x_TM, rope_2TD):
            broadcast(entering, self.ranks)
        runs, ropes = x_TM.split(forward.counts()), rope_2TD.split(forward.counts(), dim=1)
        own = self.rank // self.size
        homes = [block.home for block in forward.blocks]
        places = [place for place, home in enumerate(homes) if home in (None, own)]

        def run() -> None:
            while self.changes:
                self.storage.make(self.changes[0])
                self.changes.popleft()
            blocks = [forward.blocks[place].on(self.storage) for place in places]
            own_TM, own_2TD = x_TM, rope_2TD
            if len(places) < len(runs):
                own_TM = torch.cat([runs[place] for place in places])
                own_2TD = torch.cat([ropes[place] for place in places], dim=1)
            # From rank 0's own layers: its `forward` is the forward of all ranks.
            hidden_TM = Transformer.forward(self.layers, own_TM, own_2TD, blocks)
            made = hidden_TM.split([block.count for block in blocks])
            for place, run_TM in zip(places, made, strict=True):
                runs[place].copy_(run_TM)

        why = None
        if places:
            sums = sums_of(self.layers)
            sums.begin()
            self.layers.row_multiple = forward.row_multiple
            why = _shortage(run)
            if why is not None:
                # Outside the except block, the frames that held the forward's tensors are gone.
                if x_TM.is_cuda:
                    torch.cuda.empty_cache()
                rows = sum(len(runs[place]) for place in places)
                padded = rows + padding(rows, forward.row_multiple)
                sums.give_up(x_TM.new_zeros(padded, x_TM.shape[1]))
        # The first rank of each other set sends its rows to rank 0.
        for run_TM, home in zip(runs, homes, strict=True):
            if home and self.rank == 0:
                dist.recv(run_TM, home * self.size)
            elif home and self.rank == home * self.size:
                dist.send(run_TM, 0)
        return why


@torch.no_grad()
def follow(rank: Rank, forward: Forward) -> str | None:
    """Task of ranks 1, 2, ..: run one forward; return why memory was short, or None."""
    follower: RankLayers = rank.parts[PART]
    follower.changes.extend(forward.changes)
    attention = follower.layers.layers[0].self_attn
    rows = sum(forward.counts())
    # Without this memory a rank cannot take part at all: running out ends it, and the task.
    x_TM = attention.qkv_proj.weight.new_empty(rows, attention.qkv_proj.in_features)
    rope_2TD = torch.empty(2, rows, attention.head_dim, device=rank.device)
    return follower.compute(forward, x_TM, rope_2TD)


class LedTransformer(Transformer):
    """Rank 0's transformer: each forward runs on every rank."""

    def __init__(self, own: Transformer, arena: Arena, pool: RankPool, ranks: int, sets: int):
        """Take over the modules of `own`; `arena`: of which all ranks have a part."""
        nn.Module.__init__(self)
        self.wte, self.layers, self.ln_f = own.wte, own.layers, own.ln_f
        self.rows_seen, self.row_multiple = own.rows_seen, own.row_multiple
        self.packed_attention = own.packed_attention
        self._arena, self._pool, self._ranks, self._sets = arena, pool, ranks, sets

    def forward(self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]) -> Tensor:
        return self._lead(x_TM, rope_2TD, query_blocks, [None] * len(query_blocks))

    def branches(
        self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]
    ) -> Tensor:
        """Run branches: the set that has a block's K/V computes it, or one of the sets that do."""
        if self._sets == 1:
            return self(x_TM, rope_2TD, query_blocks)
        turn, homes = count(), list[int | None]()
        for block in query_blocks:
            home = None if block.buffer is None else block.buffer.home
            homes.append(next(turn) % self._sets if home is None else home)
        return self._lead(x_TM, rope_2TD, query_blocks, homes)

    def _lead(
        self,
        x_TM: Tensor,
        rope_2TD: Tensor,
        query_blocks: Sequence[QueryBlock],
        homes: Sequence[int | None],
    ) -> Tensor:
        """Return the rows of all sets.

        Raises torch.OutOfMemoryError if any rank had no memory, RankError if one dies or fails.
        """
        blocks = tuple(
            Block(tuple(b.spans), b.prefix.runs, b.kept.runs if b.kept else None, home)
            for b, home in zip(query_blocks, homes, strict=True)
        )
        forward = Forward(blocks, self.row_multiple, self._arena.changes())
        x_TM, rope_2TD = x_TM.contiguous(), rope_2TD.contiguous()
        size = self._ranks // self._sets
        own = RankLayers(self, self._arena.storage, 0, self._ranks, size)
        compute = partial(own.compute, forward, x_TM, rope_2TD)
        told = self._pool.run(follow, forward, ranks=self._ranks, own=compute)
        if short := [f"rank {n}: {why}" for n, why in enumerate(told) if why is not None]:
            raise torch.OutOfMemoryError("; ".join(short))
        return x_TM


def _shortage(compute: Callable[[], object]) -> str | None:
    """Compute something; return why memory was short, or None."""
    try:
        compute()
    except torch.OutOfMemoryError as error:
        return str(error).split("\n")[0]
    return None


def load_ranked(
    share_of: Load, pool: RankPool, ranks: int | None = None, *, branch_sets: int = 1
) -> HunyuanImage3ForCausalMM:
    """Return the network over the first `ranks` of a pool, or all; each reads its share.

    `share_of`: `weights.load` with all arguments but share and device. `branch_sets`: equal parts
    of the ranks, in order, which have all layers each and share out the guidance branches. Raises
    what loading raises on any rank.
    """
    used = pool.size if ranks is None else ranks
    size = used // branch_sets
    device = str(pool.here.device)
    load_own = partial(share_of, share=Share(0, size), device_map=device)
    pool.load(PART, partial(_follower, share_of, used, size), ranks=used, own=load_own)
    network: HunyuanImage3ForCausalMM = pool.here.parts.pop(PART)  # only the caller's
    network.arena = arena = Arena(
        network.new_storage(),
        page_rows(network.layer_devices[0]),
        is_led=True,
        generation=lambda: pool.generation,
    )
    network.model = LedTransformer(network.model, arena, pool, used, branch_sets)
    network.branch_sets = branch_sets
    return network


def _follower(share_of: Load, ranks: int, size: int, rank: Rank) -> RankLayers:
    """Return a rank's part of the network; `size` ranks are a set."""
    place = rank.number % size
    network = share_of(
        share=Share(place, size), first=rank.number - place, device_map=str(rank.device)
    )
    return RankLayers(network.model, network.new_storage(), rank.number, ranks, size)
