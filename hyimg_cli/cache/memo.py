"""Bounded in-memory memos: what was computed once is kept until its bytes are needed."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Values by key, least recently used first out. `hits` and `misses` count the look-ups.

    Threads may share one; two that miss at once make a value each, and one of them is kept.
    """

    def __init__(self, budget_bytes: int, size_of: Callable[[Value], int]) -> None:
        """A value larger than the whole budget is returned and not kept."""
        self._budget, self._size_of = budget_bytes, size_of
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._turn = threading.Lock()
        self.held_bytes = self.hits = self.misses = 0

    def find(self, key: Key) -> Value | None:
        """The value of `key`, which is a hit; None where it is not there, which counts nothing."""
        entry = self._values.get(key)
        return None if entry is None else self.get(key, lambda: entry[0])

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`, made by `make` where it is not there."""
        with self._turn:
            if (found := self._values.get(key)) is not None:
                self.hits += 1
                self._values.move_to_end(key)
                return found[0]
            self.misses += 1
        value = make()
        size = self._size_of(value)
        with self._turn:
            if size <= self._budget:
                _, former = self._values.pop(key, (None, 0))
                self._values[key] = value, size
                self.held_bytes += size - former
                while self.held_bytes > self._budget:
                    _, (_, freed) = self._values.popitem(last=False)
                    self.held_bytes -= freed
        return value

    def counts(self) -> dict[str, int]:
        """Look-ups until now: what was there, and what had to be made."""
        return {"hits": self.hits, "misses": self.misses}

    def clear(self) -> None:
        """Forget every value; the counters stay."""
        with self._turn:
            self._values.clear()
            self.held_bytes = 0
