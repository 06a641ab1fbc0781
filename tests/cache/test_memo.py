"""The memo against a plain dictionary."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from hyimg_cli.cache.memo import Memo


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 40))
def test_gives_what_a_dictionary_gives(keys: list[int], budget: int) -> None:
    memo: Memo[int, bytes] = Memo(budget, len)
    made: list[int] = []

    def make(key: int) -> bytes:
        made.append(key)
        return bytes([key]) * (key + 1)

    for key in keys:
        assert memo.get(key, lambda key=key: make(key)) == bytes([key]) * (key + 1)
        assert memo.held_bytes <= budget
    assert memo.misses == len(made)
    assert memo.hits + memo.misses == len(keys)


def test_the_least_recently_used_goes_first() -> None:
    memo: Memo[str, int] = Memo(2, lambda _value: 1)
    memo.get("a", lambda: 1)
    memo.get("b", lambda: 2)
    memo.get("a", lambda: 0)
    memo.get("c", lambda: 3)
    assert memo.get("a", lambda: -1) == 1
    assert memo.get("b", lambda: -1) == -1


def test_a_value_beyond_the_budget_is_not_kept() -> None:
    memo: Memo[str, bytes] = Memo(4, len)
    assert memo.get("big", lambda: b"12345") == b"12345"
    assert memo.held_bytes == 0
    memo.get("small", lambda: b"1")
    memo.clear()
    assert memo.held_bytes == 0


def test_a_value_that_two_threads_make_at_once_is_held_once() -> None:
    memo: Memo[str, bytes] = Memo(9, len)
    both = threading.Barrier(2)

    def make() -> bytes:
        both.wait(30)
        return b"12345"

    other = threading.Thread(target=lambda: memo.get("key", make))
    other.start()
    memo.get("key", make)
    other.join()
    assert (memo.held_bytes, memo.misses) == (5, 2)
    memo.get("next", lambda: b"6789")
    assert memo.find("key") is not None, "there is room for both"
