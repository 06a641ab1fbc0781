"""Which prefixes jobs that are left will look up: against the plain rule, and what is dropped."""

from itertools import permutations

import pytest

from hyimg_cli.kv.returns import Returns
from hyimg_cli.kv.segments import ImageSegment, Segment, TextSegment
from hyimg_cli.kv.tree import KVTree, Payload

HEAD, OTHER = TextSegment(tuple(range(40))), TextSegment((7, 8))
PICTURE = ImageSegment((9, 9), "a.png", ((1, 2),))
ROWS: dict[str, list[list[Segment]]] = {
    "alone": [[TextSegment((1, 2, 3))]],
    "twin": [[HEAD, PICTURE, OTHER]],
    "twin too": [[HEAD, PICTURE, OTHER]],
    "edit": [[HEAD, PICTURE, TextSegment((7, 9))], [HEAD, OTHER]],
    "begins alike": [[TextSegment((*range(33), 99))]],
}


class Rows(tuple[int, int]):
    """Tokens `[start, stop)` of a sequence, a byte each."""

    @property
    def nbytes(self) -> int:
        return self[1] - self[0]

    def split(self, at: int) -> "tuple[Rows, Rows]":
        start, stop = self
        return Rows((start, start + at)), Rows((start + at, stop))


def _length(row: list[Segment]) -> int:
    return sum(segment.length for segment in row)


@pytest.mark.parametrize("splits_text", [False, True])
def test_a_row_is_kept_as_far_as_another_job_has_it(splits_text: bool) -> None:
    returns = Returns(ROWS, ROWS.__getitem__, splits_text=splits_text)
    shared = {
        name: [_length(returns.shared(row, {})) for row in rows] for name, rows in ROWS.items()
    }
    assert shared == {
        "alone": [0],
        "twin": [44],
        "twin too": [44],
        "edit": [42, 40],
        # In blocks of 16 tokens.
        "begins alike": [32 if splits_text else 0],
    }


@pytest.mark.parametrize("splits_text", [False, True])
@pytest.mark.parametrize("order", [*permutations(ROWS)][::11])
def test_nothing_is_held_that_no_job_left_has_and_nothing_is_at_the_end(
    splits_text: bool, order: tuple[str, ...]
) -> None:
    tree: KVTree[Payload] = KVTree(10**6, splits_text=splits_text)
    returns = Returns(ROWS, ROWS.__getitem__, splits_text=splits_text)
    computed = 0
    for place, name in enumerate(order):
        for row in ROWS[name]:
            held = returns.shared(row, {})
            tree.insert("", held, lambda start, stop: Rows((start, stop)))
        computed = tree.inserted_tokens
        returns.end(name)
        for row in ROWS[name]:
            if (over := returns.over(row, {})) is not None:
                tree.trim("", *over)
        left = [row for other in order[place + 1 :] for row in ROWS[other]]
        # All that is held is the beginning of a sequence of a job that is left.
        most = sum(tree.match("", row).length for row in left)
        assert tree.held_bytes <= most
    assert len(tree) == 0
    assert computed <= 40 + 2 + 2 + 2, "each prefix is inserted once"


def test_a_picture_is_known_by_its_path_before_it_is_read() -> None:
    returns = Returns(ROWS, ROWS.__getitem__, splits_text=False)
    read = [HEAD, ImageSegment((9,) * 5, "a digest", ((5, 1),)), OTHER]
    assert _length(returns.shared(read, {"a digest": "a.png"})) == 47
    assert _length(returns.shared(read, {})) == 40
