"""Angles cut from tables against angles computed for the whole sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.models.common.spans import Grid
from hyimg_cli.models.hunyuan_image3.rope import RopeTables, positions, rope
from hyimg_cli.models.hunyuan_image3.sequence import ImageBlock

CPU = torch.device("cpu")


def _tables(budget_bytes: int = 10**8) -> RopeTables:
    return RopeTables(head_dim=32, theta=10000.0, budget_bytes=budget_bytes)


@given(
    gaps=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    sides=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=3),
    padding=st.integers(0, 5),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    budget=st.sampled_from([0, 10**8]),
)
def test_rows_are_those_of_the_whole_sequence(
    gaps: list[int],
    sides: list[tuple[int, int]],
    padding: int,
    ends: tuple[float, float],
    budget: int,
) -> None:
    """Bit by bit, for any stretch of any sequence, also with images cut in two and slots unused."""
    blocks, at = [], 0
    for gap, (rows, columns) in zip(gaps, sides, strict=False):
        at += gap
        blocks.append(ImageBlock(at, at + rows * columns + padding, Grid(rows, columns)))
        at = blocks[-1].stop
    length = at + 7
    start, stop = sorted(min(int(end * length), length - 1) for end in ends)
    stop = max(stop, start + 1)
    expected = rope(positions(length, blocks), head_dim=32, theta=10000.0)[:, start:stop]
    for tables in (_tables(budget), _tables(budget)):
        got = tables.rows(start, stop, blocks, CPU)
        assert torch.equal(got, expected)


def test_a_table_is_made_once() -> None:
    tables = _tables()
    block = [ImageBlock(3, 9, Grid(2, 3))]
    for _ in range(4):
        tables.rows(0, 12, block, CPU)
    assert tables.counts() == {"hits": 3, "misses": 1}
    tables.text([(5, 6), (200, 250), (255, 256)], CPU)
    assert tables.counts()["misses"] == 2
    tables.text([(256, 257)], CPU)
    assert tables.counts()["misses"] == 3


@pytest.mark.parametrize("spans", [[(4, 5)], [(4, 5), (17, 20), (0, 1)]])
def test_several_texts_stand_one_after_another(spans: list[tuple[int, int]]) -> None:
    got = _tables().text(spans, CPU)
    whole = rope(positions(40, ()), head_dim=32, theta=10000.0)
    assert torch.equal(got, torch.cat([whole[:, a:b] for a, b in spans], dim=1))
