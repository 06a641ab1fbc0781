"""Weights on their way from files to where a network has room for them, read by several threads.

    file ▸ a piece of memory, pinned where a GPU takes it ▸ some rows of a matrix, cast or quantised
    file ▸ the room itself, where that is main memory and of the file's dtype

Threads take tensors from all files in turn, so neither one large file nor one slow disk has one
thread alone. Beside the room each thread holds its pieces, and what is made of one.
"""

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from hyimg_cli.files import refuse_unfit
from hyimg_cli.loading.checkpoint import TensorInfo, readable

READERS = 4
# On a CPU a piece, and what is made of it, stays in a core's cache, and in memory that malloc does
# not give back each time; smaller ones cost more calls than they save. A GPU's link wants more.
PIECE_BYTES, PINNED_BYTES = 1 << 20, 1 << 24
# Weights of a piece are a multiple: blocks of 4-bit weights run on from one row to the next.
_BLOCK = 64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Pieces(threading.local):
    """Memory that a thread reads into: one piece, or two pinned ones in turn for a GPU."""

    def __init__(self) -> None:
        self._pinned: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._plain = torch.empty(0, dtype=torch.uint8)

    def filled(self, nbytes: int, device: torch.device, read: Callable[[Tensor], None]) -> Tensor:
        """`nbytes` bytes on `device`, of no use after the next ones were asked for."""
        if device.type != "cuda":
            self._plain = _at_least(self._plain, nbytes, is_pinned=False)
            read(self._plain[:nbytes])
            return self._plain[:nbytes].to(device)
        none: tuple[Tensor, torch.cuda.Event | None] = torch.empty(0, dtype=torch.uint8), None
        memory, is_copied = self._pinned.pop(0) if len(self._pinned) > 1 else none
        if is_copied is not None:
            is_copied.synchronize()
        memory = _at_least(memory, nbytes, is_pinned=True)
        read(memory[:nbytes])
        there = memory[:nbytes].to(device, non_blocking=True)
        # One event a copy: an event is a device's own, and pieces go to any.
        self._pinned.append((memory, torch.cuda.current_stream(device).record_event()))
        return there

    def fill(self, room: Tensor, data: npt.NDArray[np.uint8]) -> None:
        """Copy `data` to the bytes of a room on any device."""
        if room.device.type == "cpu":
            room.numpy()[:] = data
        else:
            room.copy_(self.filled(len(data), room.device, lambda memory: self.fill(memory, data)))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open file; nothing of it is read before it is asked for.

    `whole`: all of it in main memory, a view of the file where it is stored as it is.
    """

    name: str
    info: TensorInfo
    whole: Callable[[], Tensor]
    descriptor: int
    pieces: Pieces

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.info.dtype]

    def rows(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Runs of rows on `device` with the number of each one's first, for use one by one."""
        if self.info.packed:
            yield 0, self.whole().to(device)
            return
        shape = self.info.shape or (1,)
        row_bytes = max(1, self.info.bytes // max(1, shape[0]))
        most = PINNED_BYTES if device.type == "cuda" else PIECE_BYTES
        whole = _BLOCK // math.gcd(_BLOCK, math.prod(shape[1:]))
        step = max(1, most // row_bytes // whole) * whole
        for first in range(0, shape[0], step):
            count, start = min(step, shape[0] - first), self.info.start + first * row_bytes
            read = partial(self._read, start=start)
            data = self.pieces.filled(count * row_bytes, device, read)
            yield first, data.view(self.dtype).view(count, *shape[1:])

    def into(self, room: Tensor) -> None:
        """Fill `room`, contiguous and of this shape, on any device and in any dtype."""
        make_pages(room)
        rows = room if self.info.shape else room.view(1)
        if room.device.type == "cpu" and room.dtype == self.dtype and not self.info.packed:
            self._read(rows.view(-1).view(torch.uint8), self.info.start)
            return
        for first, some in self.rows(room.device):
            rows[first : first + len(some)].copy_(some)

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All of it in memory of its own."""
        room = torch.empty(self.info.shape, dtype=dtype, device=device)
        self.into(room)
        return room

    def _read(self, memory: Tensor, start: int) -> None:
        left = memoryview(memory.numpy().data).cast("B")
        while left:
            count = os.preadv(self.descriptor, [left], start)
            if not count:
                raise OSError(f"the file of {self.name} ends early")
            left, start = left[count:], start + count


def make_pages(room: Tensor) -> None:
    """Have the pages of new main memory made at once: one by one, each as it is first written to,
    they take as long as the reading. A kernel that cannot (Linux before 5.14) makes them later.
    """
    if room.device.type == "cpu" and sys.platform == "linux":
        start = -(-room.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (room.data_ptr() + room.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0:
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _POPULATE_WRITE
            )


def read_all(
    files: Sequence[Path],
    stored: Mapping[str, TensorInfo],
    put: Callable[[StoredTensor], None],
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """`put` each wanted tensor of `files`, several at a time.

    Raises CheckpointError where a file cannot be read, and what `put` raises; no more are begun
    then.
    """
    with ExitStack() as inside:
        pieces = Pieces()
        of_files = [inside.enter_context(_opened(p, stored, is_wanted, pieces)) for p in files]
        readers = inside.enter_context(ThreadPoolExecutor(READERS))
        inside.callback(readers.shutdown, cancel_futures=True)
        in_turn = chain.from_iterable(zip_longest(*of_files))
        for _ in readers.map(partial(_read_one, put, files[0].parent), filter(None, in_turn)):
            pass


@contextmanager
def _opened(
    path: Path,
    stored: Mapping[str, TensorInfo],
    is_wanted: Callable[[str], bool],
    pieces: Pieces,
) -> Iterator[list[StoredTensor]]:
    """The file's tensors in the order in which they lie there, while it is open."""
    with ExitStack() as inside:
        with readable(path):
            refuse_unfit(path, os.stat(path))
            descriptor = os.open(path, os.O_RDONLY)
            inside.callback(os.close, descriptor)
            file = inside.enter_context(safe_open(path, framework="pt"))
        yield [
            StoredTensor(name, info, partial(_whole, file, path, name, info), descriptor, pieces)
            for name, info in sorted(stored.items(), key=lambda pair: pair[1].start)
            if info.file == path.name and is_wanted(name)
        ]


def _whole(file: Any, path: Path, name: str, info: TensorInfo) -> Tensor:
    """A tensor of the open `file` at `path`: a view of it, or a packed matrix, float32."""
    packed = info.packed
    if packed is None:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    held: dict[str, Tensor] = {}
    for role, (part, at) in packed.parts.items():
        if at.file == path.name:
            held[role] = file.get_tensor(part)
        else:
            with safe_open(path.parent / at.file, framework="pt") as other:
                held[role] = other.get_tensor(part)
    if "quant_map" not in held:
        return held["weight"].float() * held["SCB"].float()[:, None] * (1 / 127)
    absmax = held["absmax"]
    if "nested_absmax" in held:
        each = held["nested_quant_map"].float()[absmax.int()]
        # The last block may be a part of one.
        outer = held["nested_absmax"].float().repeat_interleave(packed.nested_block)
        absmax = each * outer[: len(each)] + packed.offset
    # Two indices a byte, the even weight in its upper half.
    pairs = held["weight"].contiguous().flatten().view(torch.uint8)
    indices = torch.stack([pairs >> 4, pairs & 15], dim=-1).int()
    blocks = held["quant_map"].float()[indices].view(len(absmax), -1)
    return (blocks * absmax.float()[:, None]).view(info.shape)


def _read_one(put: Callable[[StoredTensor], None], folder: Path, tensor: StoredTensor) -> None:
    with torch.no_grad(), readable(folder / tensor.info.file):
        put(tensor)


def _at_least(memory: Tensor, nbytes: int, *, is_pinned: bool) -> Tensor:
    if len(memory) >= nbytes:
        return memory
    least = PINNED_BYTES if is_pinned else 0
    return torch.empty(max(nbytes, least), dtype=torch.uint8, pin_memory=is_pinned)
