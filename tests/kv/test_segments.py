"""Segments: equal content has equal keys, and cutting text keeps it."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyimg_cli.kv.segments import ImageSegment, Segment, TextSegment

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple)


@given(first=IDS, second=IDS)
@settings(deadline=None)
def test_keys_are_equal_where_content_is(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (TextSegment(first).key == TextSegment(second).key) == (first == second)
    image = ImageSegment(first, "digest", ((2, 2),))
    assert (image.key == ImageSegment(second, "digest", ((2, 2),)).key) == (first == second)


def test_a_key_says_all_that_shapes_a_segment() -> None:
    ids = (7, 7, 7, 7)
    segments: list[Segment] = [
        TextSegment(ids),
        ImageSegment(ids, "a", ((2, 2),)),
        ImageSegment(ids, "b", ((2, 2),)),
        ImageSegment(ids, "a", ((1, 4),)),
        ImageSegment(ids, "a", ((2, 2), (2, 2))),
    ]
    assert len({segment.key for segment in segments}) == len(segments)
    assert all(len(segment.key) == 32 and int(segment.key, 16) >= 0 for segment in segments)
    assert [segment.is_atomic for segment in segments] == [False, True, True, True, True]


@given(ids=IDS.filter(lambda ids: len(ids) > 1), share=st.floats(0, 1))
@settings(deadline=None)
def test_head_and_tail_are_the_whole(ids: tuple[int, ...], share: float) -> None:
    text, at = TextSegment(ids), 1 + int(share * (len(ids) - 2))
    assert text.head(at).length == at
    assert text.head(at).ids + text.tail(at).ids == ids


@given(common=IDS, first=IDS, second=IDS)
@settings(deadline=None)
def test_shared_with_counts_the_common_head(
    common: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    one, other = TextSegment((*common, 8, *first)), TextSegment((*common, 9, *second))
    assert one.shared_with(other) == other.shared_with(one) == len(common)
    assert one.shared_with(one) == one.length
    assert one.shared_with(TextSegment(common)) == len(common)


def test_a_segment_has_tokens() -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        TextSegment(())
    with pytest.raises(AssertionError, match="at least one token"):
        ImageSegment((), "digest", ())


def test_policy_needs_no_torch() -> None:
    code = "import sys, hyimg_cli.kv.tree, hyimg_cli.kv.segments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
