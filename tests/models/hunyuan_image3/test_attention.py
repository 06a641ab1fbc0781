"""Masks as pieces against a dense mask; query blocks against one plain softmax."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masks import visibility

from hyimg_cli.models.common.attention import canvas_block, kept_blocks
from hyimg_cli.models.common.spans import Grid, query_spans
from hyimg_cli.models.hunyuan_image3.rope import positions, rope
from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock


def _dense(length: int, spans: list[tuple[int, int]]) -> torch.Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for start, stop in spans:
        mask[start:stop, start:stop] = True
    return mask


@st.composite
def _spans(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    at, spans = 0, []
    for _ in range(draw(st.integers(0, 3))):
        at += draw(st.integers(0, 4))
        size = draw(st.integers(1, 6))
        spans.append((at, at + size))
        at += size
    return at + draw(st.integers(1, 4)), spans


@given(_spans(), st.data())
def test_pieces_are_the_dense_mask(case: tuple[int, list[tuple[int, int]]], data: Any) -> None:
    length, spans = case
    borders = [i for i in range(length) if not any(a < i < b for a, b in spans)]
    start = data.draw(st.sampled_from(borders))
    parts = query_spans(start, length, spans)
    assert torch.equal(visibility(parts, length), _dense(length, spans)[start:])


def test_an_image_is_never_cut() -> None:
    with pytest.raises(AssertionError, match="in parts"):
        query_spans(3, 9, [(2, 6)])


@pytest.mark.parametrize("cut", [4, 5, 11, 13])
def test_attention_by_pieces_equals_one_masked_softmax(small_network: Any, cut: int) -> None:
    """Two prefixes written in two goes each, against dense attention over the whole sequence."""
    attention = small_network.model.layers[1].self_attn
    length, spans = 14, [(5, 11)]
    x = torch.randn(length, small_network.arch.hidden_size)
    blocks = [ImageBlock(5, 11, Grid(2, 3))]
    angles = rope(positions(length, blocks), head_dim=attention.head_dim, theta=10000.0)
    q, k, v = (t.transpose(0, 1)[None] for t in attention.project(x, angles))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=_dense(length, spans), enable_gqa=True
    )
    expected = attention.o_proj(dense[0].transpose(0, 1).flatten(1))
    buffer = small_network.new_buffer()
    parts = []
    for start, stop in ((0, cut), (cut, length)):
        piece = angles[:, start:stop]
        blocks_of_piece = kept_blocks([(buffer, query_spans(start, stop, spans))])
        parts.append(attention(x[start:stop], piece, blocks_of_piece))
        buffer.commit(stop)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)


def test_stretches_of_unequal_length_do_not_mix(small_network: Any) -> None:
    """Two rows with made-up prefixes of 3 and 12 tokens, together and one by one."""
    attention = small_network.model.layers[0].self_attn
    width = small_network.arch.hidden_size
    together, alone, rows, angles = [], [], [], []
    for prefix in (3, 12):
        pair = [small_network.new_buffer() for _ in range(2)]
        fill = torch.randn(prefix, width)
        fill_angles = rope(positions(prefix, ()), head_dim=attention.head_dim, theta=10000.0)
        for buffer in pair:
            attention(fill, fill_angles, kept_blocks([(buffer, query_spans(0, prefix, ()))]))
            buffer.commit(prefix)
        live = torch.randn(4, width)
        live_angles = rope(
            positions(prefix + 4, ())[prefix:], head_dim=attention.head_dim, theta=10000.0
        )
        query_blocks = [canvas_block(b, query_spans(prefix, prefix + 4, ())) for b in pair]
        alone.append(attention(live, live_angles, query_blocks[:1]))
        together.append(query_blocks[1])
        rows.append(live)
        angles.append(live_angles)
    both = attention(torch.cat(rows), torch.cat(angles, dim=1), together)
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-6, rtol=1e-5)
