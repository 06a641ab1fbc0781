"""What a layer of the real network does in a call, counted on the fake GPU: launches, bytes, FLOP.

Each operation takes the larger of its FLOP and its bytes at rates measured on one H200; a row is
their sum, a bound from below for this code. What starting a kernel costs is not in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_gpu.counting import Counter, Facts, Op, Rates, counted, held
from random_network import build
from torch import Tensor
from workload import REAL, workload

from hyimg_cli.kernels.paged_decode import paged_decode
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import appended_spans, kept_blocks
from hyimg_cli.models.common.packed import Packing
from hyimg_cli.models.common.spans import query_spans
from hyimg_cli.models.hunyuan_image3.graphs import DecodeStep

DEVICE = torch.device("cuda:0")


def milliseconds(ops: list[Op]) -> float:
    return sum(map(Rates().milliseconds, ops))


class LayerRows:
    """A network of two layers; a row is the second's, which adds what the first gave, as all but
    the first do. Made and used inside `fake_gpu`.
    """

    def __init__(self, folder: Path, form: str) -> None:
        self._load = workload(folder, REAL, 2)
        self._network = build(self._load.arch, form, DEVICE, torch.bfloat16)

    def denoise(self) -> list[Op]:
        """A step of a picture with guidance."""
        branches = [self._network.branch(self._load.layout, self._filled()) for _ in range(2)]
        rope_2TD = torch.cat([branch.live_rope_2TD for branch in branches], dim=1)
        query_blocks = [branch.query_block for branch in branches]
        x_TM = self._rows(2 * self._load.live)
        return self._in_layer(lambda: self._network.model(x_TM, rope_2TD, query_blocks), len(x_TM))

    def prefill(self) -> list[Op]:
        layout, stop = self._load.layout, self._load.layout.live_start
        spans = query_spans(0, stop, layout.full_spans, (*layout.cuts, stop - 1))
        (query_block,) = kept_blocks([(self._network.new_buffer(), spans)])
        rope = self._network._rope(layout, 0, stop)
        x_TM = self._rows(stop)
        return self._in_layer(lambda: self._network.model(x_TM, rope, [query_block]), stop)

    def decode(self, count: int) -> list[Op]:
        """A token of `count` texts, by the kernels of a CUDA graph."""
        spare = self._network.new_buffer()
        spare.reserve(1)
        step = DecodeStep(self._network, count, spare, paged_decode)
        return self._in_layer(step.compute, count, count * (REAL.context + 1))

    def texts(self, count: int) -> list[Op]:
        """A token of `count` texts without the kernels of a graph."""
        buffers = [self._filled() for _ in range(count)]
        spans = appended_spans([(buffer, 1) for buffer in buffers])
        runs = [(buffer, [span]) for buffer, span in zip(buffers, spans, strict=True)]
        blocks = kept_blocks(runs)
        rope = self._network._rope(self._load.layout, 0, count)
        x_TM = self._rows(count)
        return self._in_layer(lambda: self._network.model(x_TM, rope, blocks), count)

    def _in_layer(self, call: Callable[[], object], rows: int, slots: int = 0) -> list[Op]:
        """Routing is even: so many experts are chosen at least once by so many rows."""
        arch, layer = self._load.arch, self._network.model.layers[1]
        unread = (1 - arch.moe_topk / arch.num_experts) ** rows
        borders: list[int] = []
        facts = Facts(arch.num_experts * (1 - unread), slots)
        with counted(facts) as counter, torch.no_grad(), _packed_told(counter):
            hooks = [
                layer.register_forward_pre_hook(lambda *_: borders.append(len(counter.ops))),
                layer.register_forward_hook(lambda *_: borders.append(len(counter.ops))),
            ]
            call()
        for hook in hooks:
            hook.remove()
        start, stop = borders
        return counter.ops[start:stop]

    def _filled(self) -> Buffer:
        buffer = self._network.new_buffer()
        buffer.reserve(self._load.layout.live_start)
        buffer.commit(self._load.layout.live_start)
        return buffer

    def _rows(self, count: int) -> Tensor:
        width = self._load.arch.hidden_size
        return torch.empty(count, width, dtype=torch.bfloat16, device=DEVICE)


@contextmanager
def _packed_told(counter: Counter) -> Iterator[None]:
    """Attention of many spans as one operation: its tensors do not tell how long each is."""
    attend = Packing._in_one_call

    def told(own: Packing, q_THD: Tensor, sides: Any, kind: Any, tables: Any) -> Tensor:
        seen_THD = attend(own, q_THD, sides, kind, tables)
        slots, pairs = dict[int, int](), 0
        for (start, stop), seen, owner in zip(kind.rows, kind.seen, kind.owners, strict=True):
            count = stop - start
            pairs += count * seen - (count * (count - 1) // 2 if kind.is_causal else 0)
            slots[owner] = max(slots.get(owner, 0), seen)
        (_, heads, width), kv_heads = q_THD.shape, sides[0].shape[-2]
        moved = 2 * held(seen_THD) + 2 * sum(slots.values()) * kv_heads * width * q_THD.itemsize
        counter.ops.append(Op("attention", moved, 4.0 * heads * width * pairs, q_THD.dtype))
        return seen_THD

    with mock.patch.object(Packing, "_in_one_call", told):
        yield
