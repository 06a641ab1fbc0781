"""Bounded memos in memory: values stay until their bytes are needed."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Values by key, least recently used evicted first; `hits` and `misses` count look-ups.

    Threads may share a memo; two that miss at once each make a value, and one is kept.
    """

    def __init__(self, budget_bytes: int, size_of: Callable[[Value], int]) -> None:
        """Values larger than the whole budget are returned and not kept."""
        self._budget, self._size_of = budget_bytes, size_of
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._turn = threading.Lock()
        self.held_bytes = self.hits = self.misses = 0

    def find(self, key: Key) -> Value | None:
        """Return the value of `key` as a hit; None if it is missing, which is not counted."""
        entry = self._values.get(key)
        return None if entry is None else self.get(key, lambda: entry[0])

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`; `make` makes it if it is missing."""
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
        """Return the hits and misses so far."""
        return {"hits": self.hits, "misses": self.misses}

    def clear(self) -> None:
        """Drop every value; the counters stay."""
        with self._turn:
            self._values.clear()
            self.held_bytes = 0
