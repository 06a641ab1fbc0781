"""A network whose layers are spread over ranks: rank 0 leads, the others compute.

    rank 0   prompts, embeddings, rope, heads, ViT, VAE; its share of the layers and of K/V
    rank r   its share of the layers and of K/V: a change of a buffer, or a forward, at a time

    message  a method of a buffer (`kv.mirror`), or which rows of which buffers are new
    group    the rows that enter [T, M] and their angles, from rank 0; two sums a layer, among the
             ranks that share the layers

Ranks may be several sets, each with all layers: CFG parallel. Every set computes a text's context,
because every branch of a picture begins with it. After it each guidance branch has its own set (its
buffer's home), which alone fills its K/V and runs its denoise steps, all sets at once; their first
ranks send the results to rank 0. A branch without another has no home: its K/V are everywhere, and
such branches are shared out in turn.

Code above the network does not know of ranks: only its transformer and its buffers differ.

A rank that runs out of memory in a forward takes part in its sums to the end, with zeros: so all
ranks end it, none waits for another, and buffers and slices stay as they were. The rows that the
forward wrote are void on every rank; they are after each buffer's length, where rows are written
before they are read. Rank 0 then raises torch.OutOfMemoryError, as one process would.
"""

# Legend: T new token, M model width, D head width; rope_2TD cosines, then sines
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyimg_cli.kernels.rows import padding
from hyimg_cli.kv.mirror import Call, FollowerKV, Mirror, MirroredBuffer
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.spans import QuerySpan
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.sharded import Share, sums_of
from hyimg_cli.models.hunyuan_image3.transformer import Transformer
from hyimg_cli.parallel.ranks import Rank, RankPool
from hyimg_cli.parallel.tensor import broadcast

PART = "layers"
Load = Callable[..., HunyuanImage3ForCausalMM]


@dataclass(frozen=True)
class Forward:
    """One forward, as sent to the ranks.

    `blocks`: each query block by its buffer's number, with its spans. `homes`: the set of ranks
    that computes each block; None: every set. `freed`: as in `Call`.
    """

    blocks: tuple[tuple[int, tuple[QuerySpan, ...]], ...]
    homes: tuple[int | None, ...]
    row_multiple: int
    freed: tuple[int, ...]

    def counts(self) -> list[int]:
        """Return the number of rows of each block."""
        return [spans[-1].stop - spans[0].start for _, spans in self.blocks]


@dataclass(frozen=True)
class RankLayers:
    """A rank's share of the layers; every `size` consecutive ranks of `ranks` are a set."""

    layers: Transformer
    rank: int
    ranks: int
    size: int

    def compute(
        self, forward: Forward, x_TM: Tensor, rope_2TD: Tensor, buffers: Mapping[int, Any]
    ) -> str | None:
        """Replace the entering rows by the rows after the layers: all of them, or its set's.

        Returns why memory was short, or None; the rows are then invalid, and all sums are still
        made.
        """
        for entering in (x_TM, rope_2TD):
            broadcast(entering, self.ranks)
        runs, ropes = x_TM.split(forward.counts()), rope_2TD.split(forward.counts(), dim=1)
        own = self.rank // self.size
        places = [place for place, home in enumerate(forward.homes) if home in (None, own)]

        def run() -> None:
            told = [forward.blocks[place] for place in places]
            blocks = [QueryBlock(buffers[number], spans) for number, spans in told]
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
            _, why = _attempt(run)
            if why is not None:
                # Outside the except block, the frames that held the forward's tensors are gone.
                if x_TM.is_cuda:
                    torch.cuda.empty_cache()
                rows = sum(len(runs[place]) for place in places)
                padded = rows + padding(rows, forward.row_multiple)
                sums.give_up(x_TM.new_zeros(padded, x_TM.shape[1]))
        # The first rank of each other set sends its rows to rank 0.
        for run_TM, home in zip(runs, forward.homes, strict=True):
            if home and self.rank == 0:
                dist.recv(run_TM, home * self.size)
            elif home and self.rank == home * self.size:
                dist.send(run_TM, 0)
        return why


@dataclass(frozen=True)
class LayersFollower(RankLayers):
    """A rank above 0: its layers, and its parts of the buffers."""

    kv: FollowerKV


def change_part(rank: Rank, call: Call) -> str | None:
    """Task of ranks 1, 2, ..: call a part's method; return why memory was short, or None."""
    follower: LayersFollower = rank.parts[PART]
    return _attempt(partial(follower.kv.make, call))[1]


@torch.no_grad()
def follow(rank: Rank, forward: Forward) -> str | None:
    """Task of ranks 1, 2, ..: run one forward; return why memory was short, or None."""
    follower: LayersFollower = rank.parts[PART]
    follower.kv.free(forward.freed)
    attention = follower.layers.layers[0].self_attn
    rows = sum(forward.counts())
    # Without this memory a rank cannot take part at all: running out ends it, and the task.
    x_TM = attention.qkv_proj.weight.new_empty(rows, attention.qkv_proj.in_features)
    rope_2TD = torch.empty(2, rows, attention.head_dim, device=rank.device)
    return follower.compute(forward, x_TM, rope_2TD, follower.kv.parts)


class LedTransformer(Transformer):
    """Rank 0's transformer: each forward runs on every rank."""

    def __init__(self, own: Transformer, pool: RankPool, ranks: int, sets: int) -> None:
        """Take over the modules of `own`."""
        nn.Module.__init__(self)
        self.wte, self.layers, self.ln_f = own.wte, own.layers, own.ln_f
        self.rows_seen, self.row_multiple = own.rows_seen, own.row_multiple
        self._on_all, self._ranks, self._sets = partial(_on_all, pool, ranks), ranks, sets
        self.mirror = Mirror(partial(_change_on_all, pool, ranks), lambda: pool.generation)

    def forward(self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]) -> Tensor:
        return self._lead(x_TM, rope_2TD, query_blocks, [None] * len(query_blocks))

    def branches(
        self, x_TM: Tensor, rope_2TD: Tensor, query_blocks: Sequence[QueryBlock]
    ) -> Tensor:
        """Run branches: the set that has a block's K/V computes it, or one of the sets that do."""
        if self._sets == 1:
            return self(x_TM, rope_2TD, query_blocks)
        turn, homes = count(), []
        for block in query_blocks:
            home = self.mirror.require(block.buffer).home
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

        Raises torch.OutOfMemoryError if any rank had no memory, RankError if one dies or fails, or
        if a buffer is older than such a death.
        """
        numbers = [self.mirror.require(block.buffer).number for block in query_blocks]
        forward = Forward(
            tuple((n, tuple(b.spans)) for n, b in zip(numbers, query_blocks, strict=True)),
            tuple(homes),
            self.row_multiple,
            self.mirror.drain_freed(),
        )
        buffers = {own: block.buffer for own, block in zip(numbers, query_blocks, strict=True)}
        x_TM, rope_2TD = x_TM.contiguous(), rope_2TD.contiguous()
        own = RankLayers(self, 0, self._ranks, self._ranks // self._sets)
        self._on_all(follow, forward, lambda: (None, own.compute(forward, x_TM, rope_2TD, buffers)))
        return x_TM


def _on_all(
    pool: RankPool,
    ranks: int,
    task: Callable[..., str | None],
    told: Call | Forward,
    own: Callable[[], tuple[Any, str | None]],
) -> Any:
    """Return the result of `own` on rank 0, while the other ranks run a task.

    Raises torch.OutOfMemoryError if one of them ran out of memory.
    """
    (made, why), *others = pool.run(task, told, ranks=ranks, own=own)
    short = [f"rank {n}: {told}" for n, told in enumerate([why, *others]) if told is not None]
    if short:
        raise torch.OutOfMemoryError("; ".join(short))
    return made


def _change_on_all(pool: RankPool, ranks: int, call: Call, own: Callable[[], Any]) -> Any:
    return _on_all(pool, ranks, change_part, call, partial(_attempt, own))


def _attempt(compute: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result, and why memory was short, or None."""
    try:
        return compute(), None
    except torch.OutOfMemoryError as error:
        return None, str(error).split("\n")[0]


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
    network.model = led = LedTransformer(network.model, pool, used, branch_sets)
    network.buffer_kind = partial(MirroredBuffer, led.mirror)
    network.branch_sets = branch_sets
    return network


def _follower(share_of: Load, ranks: int, size: int, rank: Rank) -> LayersFollower:
    """Return a rank's part of the network; `size` ranks are a set."""
    number, place = divmod(rank.number, size)
    network = share_of(
        share=Share(place, size), first=rank.number - place, device_map=str(rank.device)
    )
    kv = FollowerKV(network.new_buffer, network.layer_devices, number)
    return LayersFollower(network.model, rank.number, ranks, size, kv)
