"""A little of `tests/fuzz.py`, which finds more the longer it runs."""

from collections import Counter
from collections.abc import Iterator

import fuzz
import pytest

CASES = {"manifests": 4, "sources": 8, "checkpoints": 10, "records": 12, "journals": 10,
         "settings": 12, "tables": 10}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with fuzz.alone():
        yield


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_nothing_of_others_ends_in_a_traceback(kind: str) -> None:
    depth = Counter[str]()
    assert [text for seed in range(CASES[kind]) for text in fuzz.tried(kind, seed, depth)] == []
    assert depth["deep"] >= depth["every"] / 4, "most files were refused at first sight"


def test_what_would_be_wrong_is_seen() -> None:
    assert fuzz.wrong(101, "", "Traceback") == "exit code 101"
    assert fuzz.wrong(0, "\x9b", "") == "raw [\"'\\\\x9b'\"]"
    assert fuzz.wrong(2, "", "error[y]: a\nerror[x]: b\n") == "a forged line"
    assert not fuzz.wrong(2, "a\n", "error[y]: a\n")
    shallow, deep = "error[recipe.not-toml]: a\n", "error[recipe.wrong-type]: error[x]\n"
    assert [fuzz.reached(err) for err in ("", shallow, deep + shallow)] == [(1, 1), (0, 1), (1, 2)]
