"""Attention of many spans in one call: the bits of a call for each, by a twin of torch's function.

The twin calls the product's own attention a span at a time, with what the call is told.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_gpu.device import fake_gpu
from packed_scenes import CPU, HALF, Scene
from torch import Tensor

from hyimg_cli.kernels import attention
from hyimg_cli.kernels.attention import PackedAttention, masked_attention, packed_attention_of
from hyimg_cli.kv.arena import CPU_PAGE, Arena, Storage
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.common.attention import QueryBlock, attend_blocks, canvas_block
from hyimg_cli.models.common.packed import Packing, packed
from hyimg_cli.models.common.spans import query_spans

HEADS, KV_HEADS, WIDTH = 4, 2, 8
Blocks = Callable[[], list[QueryBlock]]


def twin(
    query: Tensor, keys: Tensor, values: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor,
    block_table: Tensor | None, num_splits: int,
) -> Tensor:  # fmt: skip
    """`varlen_attn` as a loop; a span's last query is aligned with the last slot that it sees."""
    assert num_splits == 1
    assert enable_gqa
    tables = [cu_seq_q, cu_seq_k, seqused_k, *([] if block_table is None else [block_table])]
    assert {table.dtype for table in tables} == {torch.int32}
    out, starts, own = torch.empty_like(query), cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (starts[-1], len(own)) == (len(query), len(starts))
    for number, (start, stop) in enumerate(pairwise(starts)):
        slots = int(seqused_k[number])
        assert 1 < max_q >= stop - start
        assert max_k >= slots
        if block_table is None:
            assert own[number] + slots <= own[number + 1] <= len(keys)
            seen = [side[own[number] : own[number] + slots] for side in (keys, values)]
        else:
            seen = [
                side[block_table[number].long()].flatten(0, 1)[:slots] for side in (keys, values)
            ]
        sides = (side.transpose(0, 1) for side in seen)
        out[start:stop] = masked_attention(query[start:stop], *sides, window_size == (-1, 0))
    return out


def _rows(blocks: list[QueryBlock], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(block.count for block in blocks) + padding
    made = (torch.randn(rows, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (rows.to(HALF) for rows in made)
    return q, k, v


SCENES = {
    "one canvas": lambda: Scene(13).canvases(),
    "two canvases": lambda: Scene(13, 22).canvases(),
    "pictures": lambda: Scene(13, 7, 9).pictures(),
    "new prefix": lambda: Scene(0).prefixes(),
    "two prefixes": lambda: Scene(6, 11).prefixes(),
    "a text": lambda: Scene(9).texts()[:1],
    "texts": lambda: Scene(9, 4, 17).texts(),
}


def _difference(blocks: list[QueryBlock], takes_full: bool, padding: int = 0) -> tuple[Any, ...]:
    """Attention and what is in pages afterwards, as one packing and a span at a time."""
    given = _rows(blocks, padding)
    packing = packed(PackedAttention(twin, takes_full), blocks)
    assert isinstance(packing, Packing)
    storage = blocks[0].storage
    for side in (storage.keys_SKD[0], storage.values_SKD[0]):
        side.normal_()  # also what is behind a text in its page, which nobody may see
    found = []
    for attend in (
        partial(packing.attend, masked_attention, 0),
        partial(attend_blocks, masked_attention, 0, blocks),
    ):
        seen = attend(*given)
        found.append((seen, storage.keys_SKD[0].clone(), storage.values_SKD[0].clone()))
    return tuple(found)


@pytest.mark.parametrize("takes_full", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("scene", SCENES)
def test_the_bits_of_a_call_for_each_span(scene: str, padding: int, takes_full: bool) -> None:
    ours, theirs = _difference(SCENES[scene](), takes_full, padding)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scene", ["two canvases", "pictures"])
def test_keys_of_another_branch_would_be_seen(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Packing.__init__

    def planted(one: Packing, *given: Any) -> None:
        own(one, *given)
        one._key_starts[1] -= 1

    monkeypatch.setattr(Packing, "__init__", planted)
    with pytest.raises(AssertionError, match="<="):
        _difference(SCENES[scene](), takes_full=True)


def test_a_page_of_another_text_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Packing._pages
    monkeypatch.setattr(Packing, "_pages", lambda one, _, device: own(one, 0, device))
    ours, theirs = _difference(Scene(16, 16).texts(), takes_full=True)
    assert not torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("scene", SCENES)
def test_at_most_two_calls_a_layer(scene: str) -> None:
    calls = list[tuple[int, int]]()

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(options["window_size"])
        return twin(*given, **options)

    blocks = SCENES[scene]()
    packing = packed(PackedAttention(counted, True), blocks)
    assert isinstance(packing, Packing)
    packing.attend(masked_attention, 0, *_rows(blocks))
    assert len(calls) == len({*calls}) <= 2


def test_what_is_not_packed() -> None:
    """Without the function, in float32, and canvases beside rows that are kept."""
    scene, kernel = Scene(13, 22), PackedAttention(twin, True)
    canvases, prefixes = scene.canvases(), scene.prefixes()
    assert packed(None, canvases) is canvases
    mixed = [canvases[0], prefixes[1]]
    assert packed(kernel, mixed) is mixed
    scene = Scene(13, 22)
    unlike = [scene.canvases()[0], scene.pictures()[1]]
    assert packed(kernel, unlike) is unlike
    twice = [canvas_block(scene.buffers[0], query_spans(13, 20, [(14, 17)]))]
    assert packed(kernel, twice) is twice
    wide = Storage(kv_heads=KV_HEADS, head_dim=WIDTH, dtype=torch.float32, devices=[CPU])
    buffer = Buffer(Arena(wide, CPU_PAGE))
    alone = [canvas_block(buffer, query_spans(0, 4, [(0, 4)]))]
    assert packed(kernel, alone) is alone


def test_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with flash attention; where cuDNN's kernel is taken, full spans are left to it."""
    gpu = torch.device("cuda:0")
    assert packed_attention_of(CPU, HALF) is None
    with fake_gpu():
        assert packed_attention_of(gpu, torch.float32) is None
        for takes_cudnn in (True, False):
            monkeypatch.setattr(attention, "_takes_cudnn", lambda *_, told=takes_cudnn: told)
            if torch.__version__ >= "2.15":
                found = packed_attention_of(gpu, HALF)
                assert found is not None
                assert found.takes_full is not takes_cudnn
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert packed_attention_of(gpu, HALF) is None
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert packed_attention_of(gpu, HALF) is None
