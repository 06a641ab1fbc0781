"""Encoded inputs of jobs: from memory, else from disk, else encoded now.

Inputs are source pictures and texts. What encodes them decides the contents of a key, which never
include seeds or steps. Results are never modified, because jobs share the same tensors.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Generic, Literal, TypeVar

from hyimg_cli.cache.disk import DiskStore
from hyimg_cli.cache.memo import Memo
from hyimg_cli.memory.footprint import ENCODED_BYTES
from hyimg_cli.settings.run import CacheConfig
from hyimg_cli.spec import digest

Value = TypeVar("Value")
Place = Literal["memory_hits", "disk_hits", "misses"]


@dataclass(frozen=True)
class Encoding(Generic[Value]):
    """How one input is encoded, and its result written to disk and read again.

    `key`: hex digest of everything that decides the result. `unpack` raises ValueError for bytes
    that `pack` did not write for this key.
    """

    key: str
    encode: Callable[[], Value]
    pack: Callable[[Value], bytes]
    unpack: Callable[[bytes], Value]

    def within(self, scope: str) -> "Encoding[Value]":
        """Return the encoding of a scope's own entry; without a scope, the same one."""
        return replace(self, key=digest.of_json([self.key, scope])) if scope else self


class EncodedInputs(Generic[Value]):
    """Encodes each input once; later runs find the result on disk.

    Threads may share it: one of them encodes at a time, and the others wait for its result.
    """

    def __init__(self, cache: CacheConfig, kind: str, size_of: Callable[[Value], int]) -> None:
        """`kind`: the kind of entry in the disk cache."""
        self._kind = kind
        self._memo: Memo[str, Value] = Memo(ENCODED_BYTES, size_of)
        self._store = DiskStore(cache.folder, cache.budget_bytes)
        self._making = Lock()
        # By key: warnings of the disk, for the first job that asks.
        self._warnings: dict[str, tuple[str, ...]] = {}
        self.counts: dict[str, int] = {"memory_hits": 0, "disk_hits": 0, "misses": 0}

    def find(
        self, encoding: Encoding[Value], making: AbstractContextManager[object] | None = None
    ) -> tuple[Value, Place]:
        """Return an encoded input, and where it was; memory hits are left for callers to count.

        An input that is not in memory is read or encoded in the context `making`, which ends
        before another thread can find the result.
        """
        if (known := self._memo.find(encoding.key)) is not None:
            return known, "memory_hits"
        with self._making:
            # Another thread may have encoded it before it released the lock.
            if (known := self._memo.find(encoding.key)) is not None:
                return known, "memory_hits"
            with making or nullcontext():
                value, was_there = self._store.read_through(
                    self._kind,
                    encoding.key,
                    encoding.encode,
                    pack=encoding.pack,
                    unpack=encoding.unpack,
                )
            place: Place = "disk_hits" if was_there else "misses"
            self.counts[place] += 1
            if warnings := self._store.take_notes():
                self._warnings[encoding.key] = warnings
            # Last, so that a thread that finds the result also finds its warnings.
            self._memo.get(encoding.key, lambda: value)
            return value, place

    def take_warnings(self, encoding: Encoding[Value]) -> tuple[str, ...]:
        """Return what the disk's faults were when this input was made, once."""
        return self._warnings.pop(encoding.key, ())

    def clear(self) -> None:
        """Drop everything in memory."""
        self._memo.clear()
