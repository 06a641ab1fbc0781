"""What a layer of the real network does in a call, counted on the fake GPU: launches, bytes, FLOP.

Each operation takes the larger of its FLOP and its bytes at rates measured on one H200; a row is
their sum, a bound from below for this code. What starting a kernel costs is not in it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from fake_gpu.counting import Facts, Op, Rates, counted
from random_network import build
from torch import Tensor
from workload import REAL, workload

from hyimg_cli.kernels.paged_decode import paged_decode
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import kept_blocks
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

    def _in_layer(self, call: Callable[[], object], rows: int, slots: int = 0) -> list[Op]:
        """Routing is even: so many experts are chosen at least once by so many rows."""
        arch, layer = self._load.arch, self._network.model.layers[1]
        unread = (1 - arch.moe_topk / arch.num_experts) ** rows
        borders: list[int] = []
        with counted(Facts(arch.num_experts * (1 - unread), slots)) as counter, torch.no_grad():
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
