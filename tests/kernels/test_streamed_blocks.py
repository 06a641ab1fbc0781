"""Blocks that come one after another: the same bits, each once a forward, and nothing goes back."""

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_gpu.device import fake_gpu
from torch import Tensor, nn

from hyimg_cli.kernels.streamed_blocks import StreamedBlocks
from hyimg_cli.kernels.transfer import tensors_of

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
WIDTH, COUNT = 64, 5


class Block(nn.Module):
    """Weights of several dtypes, sizes and strides, and a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH + number)
        self.second = nn.Linear(WIDTH + number, WIDTH, dtype=torch.bfloat16)
        self.second.weight.data = self.second.weight.data.t().contiguous().t()
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("is_on", torch.tensor([True] * 3).expand(2, 3))

    def forward(self, rows: Tensor) -> Tensor:
        inner = self.first(rows).to(torch.bfloat16)
        return rows + self.scale * self.second(inner).float() * self.is_on.all()


def _network() -> list[Block]:
    return [Block(number).requires_grad_(False) for number in range(COUNT)]


def _passed(blocks: Any, rows: Tensor) -> Tensor:
    for block in blocks:
        rows = block(rows)
    return rows


def _bytes(blocks: Any) -> int:
    return sum(tensor.nbytes for block in blocks for tensor in tensors_of(block))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_same_bits_in_any_order_of_calls(is_compiled: bool) -> None:
    blocks, rows = _network(), torch.randn(4, WIDTH)
    orders = [blocks, blocks[::-1], blocks[:2], [blocks[0], *blocks], blocks]
    expected = [_passed(order, rows) for order in orders]
    strides = [tensor.stride() for block in blocks for tensor in block.parameters()]
    streamed = StreamedBlocks(blocks, CPU)
    assert strides == [tensor.stride() for block in blocks for tensor in block.parameters()]
    if is_compiled:
        for block in blocks:
            block.compile(backend="eager")
    for order, wanted in zip(orders, expected, strict=True):
        assert torch.equal(_passed(order, rows), wanted)
    streamed.unload()
    assert torch.equal(_passed(blocks, rows), expected[0])


def test_weights_that_a_block_gets_later_come_too_and_leave_no_trace() -> None:
    blocks, rows = _network(), torch.randn(4, WIDTH)
    plain = _passed(blocks, rows)
    streamed = StreamedBlocks(blocks, CPU)
    own = blocks[2].first
    blocks[2].first = nn.Sequential(own, nn.Linear(own.out_features, own.out_features))
    blocks[2].requires_grad_(False)
    styled = _passed(blocks, rows)
    assert torch.equal(_passed(blocks, rows), styled)
    assert not torch.equal(styled, plain)
    assert len(streamed._packs[2]) == 2
    streamed.unload()
    blocks[2].first = own
    assert torch.equal(_passed(blocks, rows), plain)
    assert len(streamed._packs[2]) == 1


def test_a_copy_without_memory_leaves_every_block_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, rows = _network(), torch.randn(4, WIDTH)
    expected = _passed(blocks, rows)
    streamed = StreamedBlocks(blocks, CPU)
    allowed = iter(range(3))
    empty_like = torch.empty_like

    def short(tensor: Tensor, **options: Any) -> Tensor:
        if options.get("device") == CPU and next(allowed, None) is None:
            raise torch.OutOfMemoryError("no room")
        return empty_like(tensor, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", short)
        with pytest.raises(torch.OutOfMemoryError):
            _passed(blocks, rows)
    assert torch.equal(_passed(blocks, rows), expected)
    streamed.unload()
    assert not streamed._here


@pytest.mark.parametrize("order", [range(COUNT), (2, 0, 1, 3, 4)])
def test_each_block_comes_once_a_forward_and_nothing_goes_back(order: Sequence[int]) -> None:
    """The host never waits, and two blocks are on the device at most.

    Also from the second forward on if a network calls its blocks in another order than it has them.
    """
    with fake_gpu() as gpu:
        _count_forwards(gpu, order)
        gc.collect()


def _count_forwards(gpu: Any, order: Sequence[int]) -> None:
    blocks = _network()
    called = [blocks[number] for number in order]
    size, most = _bytes(blocks), max(_bytes(pair) for pair in pairwise(called))
    # Tensors begin at addresses that kernels read fast.
    gaps = 256 * len(tensors_of(blocks[0]))
    streamed = StreamedBlocks(blocks, GPU)
    rows = torch.zeros(4, WIDTH, device=GPU)
    _passed(called, rows)
    gpu.waits.clear()
    for _ in range(3):
        gpu.sent = gpu.fetched = 0
        base = gpu.rebase()
        _passed(called, rows)
        assert size <= gpu.sent <= size + gaps * COUNT
        assert gpu.fetched == 0
        assert gpu.live == base
        activations = 8 * rows.nbytes
        assert gpu.peak <= most + 2 * gaps + activations
    assert not gpu.waits
    assert not gpu.reads
    assert not gpu.strays
    streamed.unload()
    assert gpu.live == rows.nbytes
