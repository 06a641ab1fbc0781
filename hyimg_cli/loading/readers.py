"""Read weights from files into a network's memory with several threads.

    file ▸ a piece of memory, pinned for a GPU ▸ some rows of a matrix, cast or quantized
    file ▸ the network's memory, if that is main memory and has the file's dtype

Threads take tensors from all files in turn, so no large file or slow disk is left to one thread.
Besides the network's memory, each thread holds a piece and the rows made of it.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hyimg_cli.errors import require
from hyimg_cli.files import descriptor_of
from hyimg_cli.loading.checkpoint import TensorInfo, readable

READERS = 4
# On a CPU, a piece and its result stay in a core's cache; smaller pieces cost more calls than they
# save. A GPU's link needs larger pieces, and torch keeps the memory pinned for them.
PIECE_BYTES, PINNED_BYTES = 1 << 20, 1 << 24
# A piece has a multiple of this many weights: blocks of 4-bit weights continue across rows.
_BLOCK = 64
_CACHE_LINE = 64
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open checkpoint file, read on request. `files`: all files by name."""

    name: str
    info: TensorInfo
    descriptor: int
    files: Mapping[str, Any]

    def whole(self) -> Tensor:
        """Return all of it in main memory: a view of the file, or a packed matrix in float32."""
        stored = (self.info.parts or {self.name: self.info}).items()
        tensors = {name: self.files[info.file].get_tensor(name) for name, info in stored}
        return _unpack(self.name, tensors) if self.info.parts else tensors[self.name]

    def rows(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield runs of rows on `device`, each with the number of its first row."""
        if self.info.parts:
            yield 0, self.whole().to(device)
            return
        shape, is_gpu = self.info.shape or (1,), device.type == "cuda"
        row_bytes = max(1, self.info.bytes // max(1, shape[0]))
        most = PINNED_BYTES if is_gpu else PIECE_BYTES
        whole = _BLOCK // math.gcd(_BLOCK, math.prod(shape[1:]))
        step = max(1, most // row_bytes // whole) * whole
        for first in range(0, shape[0], step):
            count, start = min(step, shape[0] - first), self.info.start + first * row_bytes
            # The other threads read while this one waits for its copy to a GPU.
            piece = torch.empty(count * row_bytes, dtype=torch.uint8, pin_memory=is_gpu)
            self._read(piece, start)
            yield first, piece.to(device).view(DTYPES[self.info.dtype]).view(count, *shape[1:])

    def into(self, room: Tensor) -> None:
        """Fill `room`, contiguous and of this shape, on any device and in any dtype."""
        rows = room if self.info.shape else room.view(1)
        is_as_stored = room.dtype == DTYPES[self.info.dtype] and not self.info.parts
        if room.device.type == "cpu" and is_as_stored:
            self._read(rows.view(-1).view(torch.uint8), self.info.start)
            return
        for first, some in self.rows(room.device):
            rows[first : first + len(some)].copy_(some)

    def _read(self, memory: Tensor, start: int) -> None:
        left = memoryview(memory.numpy().data).cast("B")
        while left:
            count = os.preadv(self.descriptor, [left], start)
            if not count:
                raise OSError(f"the file of {self.name} ends early")
            left, start = left[count:], start + count


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose products do not depend on the length of its file's header.

    Where a file is mapped, headers move the weights, and products of numbers that do not begin at a
    cache line may round differently. Those are copied.
    """
    return tensor.clone() if tensor.data_ptr() % _CACHE_LINE else tensor


def read_all(
    files: Sequence[Path], stored: Mapping[str, TensorInfo], put: Callable[[StoredTensor], None]
) -> None:
    """Pass each of the `stored` tensors in `files` to `put`, several at a time.

    Raises CheckpointError if a file cannot be read, MachineError if bitsandbytes, which unpacks, is
    not installed, and what `put` raises; no more tensors are started then.
    """
    if any(info.parts for info in stored.values()):
        require("bitsandbytes", extra="nf4")
    paths, descriptors, handles = {path.name: path for path in files}, {}, {}
    with ExitStack() as inside:
        for file, path in paths.items():
            with readable(path):
                descriptors[file] = descriptor_of(path, os.O_RDONLY)
                inside.callback(os.close, descriptors[file])
                handles[file] = inside.enter_context(safe_open(path, framework="pt"))
        # From all files in turn, each in its own order.
        tensors = [
            StoredTensor(name, info, descriptors[info.file], handles)
            for name, info in sorted(stored.items(), key=lambda pair: pair[1].start)
        ]

        def put_one(tensor: StoredTensor) -> None:
            with torch.no_grad(), readable(paths[tensor.info.file]):
                put(tensor)

        readers = inside.enter_context(ThreadPoolExecutor(READERS))
        inside.callback(readers.shutdown, cancel_futures=True)
        for _ in readers.map(put_one, tensors):
            pass


def _unpack(name: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the weights of the packed matrix `name` in float32, from its `parts` by name."""
    from bitsandbytes import functional

    weight, scales = parts.pop(name), parts.get(f"{name.removesuffix('weight')}SCB")
    if scales is not None:
        return weight.float() * scales[:, None] * (1 / 127)
    state = functional.QuantState.from_dict(parts, weight.device)
    # In one row: bitsandbytes' CPU kernel (0.50) does not continue a block across rows.
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    state.dtype = torch.float32
    weights: Tensor = functional.dequantize_4bit(weight.view(torch.uint8).view(-1, 1), state)
    return weights.view(shape)
