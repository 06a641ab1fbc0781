"""A buffer against a plain list of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.kv.buffer import Buffer

LAYERS, HEADS, WIDTH = 2, 2, 4


def _buffer(capacity: int) -> Buffer:
    return Buffer(
        kv_heads=HEADS,
        head_dim=WIDTH,
        capacity=capacity,
        dtype=torch.float32,
        devices=[torch.device("cpu")] * LAYERS,
    )


def _copy(buffer: Buffer, prefix: int, capacity: int) -> Buffer:
    copy = _buffer(capacity)
    copy.copy_prefix(buffer, prefix)
    return copy


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


@given(
    runs=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    rewrites=st.integers(0, 3),
    copied_at=st.floats(0, 1),
)
def test_reads_what_was_written_last(runs: list[int], rewrites: int, copied_at: float) -> None:
    capacity = sum(runs)
    buffer = _buffer(capacity)
    oracle: list[torch.Tensor] = []
    for seed, count in enumerate(runs):
        for attempt in range(rewrites + 1):  # scratch is rewritten before it is committed
            rows = _rows(count, 100 * seed + attempt)
            for layer in range(LAYERS):
                buffer.write(layer, buffer.length, rows + layer, rows - layer)
        buffer.commit(buffer.length + count)
        oracle.extend(rows)
    expected = torch.stack(oracle)
    for layer in range(LAYERS):
        keys, values = buffer.read(layer, capacity)
        assert torch.equal(keys.transpose(0, 1), expected + layer)
        assert torch.equal(values.transpose(0, 1), expected - layer)
    prefix = int(copied_at * capacity)
    copy = _copy(buffer, prefix, capacity + 3)
    assert (copy.length, copy.capacity) == (prefix, capacity + 3)
    assert torch.equal(copy.read(0, prefix)[0], buffer.read(0, prefix)[0])
    for one in (buffer, copy):
        keys_HSD = one.keys_HSD[0]
        assert keys_HSD.stride()[:2] == (one.capacity * WIDTH, WIDTH) or 1 in keys_HSD.shape


def test_what_was_taken_is_a_copy() -> None:
    buffer = _buffer(4)
    buffer.write(0, 0, _rows(2, 0), _rows(2, 1))
    buffer.commit(2)
    copy = _copy(buffer, 2, 4)
    before = copy.read(0, 2)[0].clone()
    buffer.write(0, 0, _rows(2, 2), _rows(2, 3))
    assert torch.equal(copy.read(0, 2)[0], before)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3), turns=st.permutations(range(4)))
def test_a_lent_place_is_as_good_as_a_copy(lengths: list[int], turns: list[int]) -> None:
    """Whoever writes last, each reads its own prefix and its own scratch, out of one memory."""
    full = _buffer(9)
    for layer in range(LAYERS):
        full.write(layer, 0, _rows(6, layer), _rows(6, layer + 9))
    full.commit(6)
    copies = [_copy(full, length, 9) for length in (6, *lengths)]
    lent = [full, *(full.alias(length) for length in lengths)]
    for number in [turn for turn in turns if turn < len(lent)] * 2:
        for layer in range(LAYERS):
            stop = lent[number].length + 3
            rows = _rows(3, 20 + number)
            for one in (lent[number], copies[number]):
                one.write(layer, stop - 3, rows, -rows)
            for ours, theirs in zip(
                lent[number].read(layer, stop), copies[number].read(layer, stop), strict=True
            ):
                assert torch.equal(ours, theirs)
    assert len({keys.data_ptr() for one in lent for keys in one.keys_HSD}) == LAYERS


def test_reading_copies_nothing() -> None:
    buffer = _buffer(8)
    keys, _ = buffer.read(1, 5)
    assert keys.data_ptr() == buffer.keys_HSD[1].data_ptr()
    assert buffer.nbytes == 2 * LAYERS * HEADS * 8 * WIDTH * 4


def test_only_committed_tokens_are_shared() -> None:
    buffer = _buffer(4)
    buffer.commit(2)
    with pytest.raises(AssertionError, match="only committed"):
        _copy(buffer, 3, 8)
    with pytest.raises(AssertionError, match="only grows"):
        buffer.commit(1)


def test_withdrawn_rows_are_scratch_again() -> None:
    buffer = _buffer(4)
    buffer.commit(3)
    buffer.truncate(2)
    assert buffer.length == 2
    with pytest.raises(AssertionError, match="only committed"):
        buffer.cut(0, 3)
    with pytest.raises(AssertionError, match="committed can be cut off"):
        buffer.truncate(3)
