"""A compiled layer is one graph for sequences of any length, wherever their pages lie.

Kernels are operations without numbers. A compiler is not run: what it would be given is counted.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_scenes import CPU, HALF, Scene
from torch import Tensor
from torch.fx.experimental import _config as sizes

from hyimg_cli.kernels.attention import PackedAttention
from hyimg_cli.kernels.experts import RoutedTokens
from hyimg_cli.models.bagel.config import DecoderShape
from hyimg_cli.models.bagel.decoder import NewTokens, PairedDecoder
from hyimg_cli.models.common.attention import QueryBlock
from hyimg_cli.models.common.packed import Packing, packed
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.weights import load

# What is always run: what differs most. The others take as long and find the same.
QUICK = {("canvases", 2, True), ("prefixes", 2, False)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.thorough)
    for case in product(("canvases", "pictures", "prefixes", "texts"), (1, 2), (True, False))
]


@pytest.fixture(scope="module")
def network(small_folder: Path) -> HunyuanImage3ForCausalMM:
    return load(small_folder, dtype=HALF)


def _kernel(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> Tensor:
    return query + keys.flatten()[0]


def _blocks(kind: str, count: int, number: int, kv_heads: int, width: int) -> list[QueryBlock]:
    """Return blocks of sequences in more runs of pages for each number."""
    lengths = [40 + 8 * number + 4 * one for one in range(count)]
    scene = Scene(*lengths, kv_heads=kv_heads, width=width)
    if kind == "canvases":
        return scene.canvases(20 + 7 * number)
    blocks: list[QueryBlock] = getattr(scene, kind)()
    return blocks


def _graphs(
    layer: Callable[..., Any], given: Sequence[tuple[Any, ...]], dynamic: bool | None = True
) -> list[int]:
    """Return how many graphs have been compiled after each call; `dynamic`: torch's own."""
    graphs, counts = list[Any](), list[int]()

    def compiled(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    whole = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=compiled)
    # Numbers of different things that are equal by chance would be taken for one.
    with torch.no_grad(), sizes.patch(use_duck_shape=False):
        for one in given:
            whole(*one)
            counts.append(len(graphs))
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize(("kind", "count", "takes_full"), CASES)
def test_ten_lengths_of_hunyuan_image3(
    kind: str,
    count: int,
    takes_full: bool,
    network: HunyuanImage3ForCausalMM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = network.model.layers[0]
    own, width = layer.self_attn, network.model.wte.weight.shape[1]

    def experts(tokens: RoutedTokens) -> Tensor:
        assert tokens.onto_TM is not None
        return tokens.onto_TM + tokens.weight_TK.sum()

    monkeypatch.setattr(layer.mlp, "compute", experts)

    def given(number: int) -> tuple[Any, ...]:
        blocks = _blocks(kind, count, number, own.kv_heads, own.head_dim)
        packing = packed(PackedAttention(_kernel, takes_full), blocks)
        assert isinstance(packing, Packing)
        packing.told(CPU)
        rows = sum(block.count for block in blocks)
        x_TM, pending_TM = torch.randn(2, rows, width, dtype=HALF)
        return x_TM, pending_TM, torch.randn(2, rows, own.head_dim), packing

    calls = [given(number) for number in range(10)]
    assert _graphs(layer, calls) == [1] * 10
    if count == 1:
        # As torch is called by itself: one graph of the first length, and one of all others.
        assert _graphs(layer, calls, dynamic=None) == [1, *[2] * 9]


@pytest.mark.parametrize(("kind", "count", "takes_full"), CASES)
def test_ten_lengths_of_bagel(kind: str, count: int, takes_full: bool) -> None:
    shape = DecoderShape(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=16, max_position_embeddings=512,
        rope_theta=1e6, rms_norm_eps=1e-6,
    )  # fmt: skip
    decoder = PairedDecoder(shape).to(HALF)
    decoder.packed_attention = PackedAttention(_kernel, takes_full)

    def given(number: int) -> tuple[Any, ...]:
        blocks = _blocks(kind, count, number, shape.num_key_value_heads, shape.head_dim)
        is_gen = kind == "canvases"
        new = [
            NewTokens(one, range(one.count), [is_gen and row > 0 for row in range(one.count)])
            for one in blocks
        ]
        rows = decoder.rows(new, CPU)
        assert isinstance(rows.blocks, Packing)
        rows.blocks.told(CPU)
        x_TM = torch.randn(sum(rows.counts), shape.hidden_size, dtype=HALF)
        return x_TM.split(rows.counts), None, rows

    assert _graphs(decoder.layers[0], [given(number) for number in range(10)]) == [1] * 10
