"""K/V of some tokens as tensors of their own: in main memory, or of a model without an arena."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """K/V of some tokens by layer, whose dimension 1 is the token."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def to_host(self) -> "Slice":
        """Return a copy in main memory, pinned if a GPU will fetch it back; waits for the copy."""
        copied = self._mapped(_to_host)
        for device in {rows.device for rows in self.keys if rows.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def to_devices(self, devices: Sequence[torch.device]) -> "Slice":
        """Return a copy with each layer on its device, given one entry per layer.

        A GPU's copy is queued when this returns, ahead of all later work.
        """
        return Slice(
            tuple(_sent(k, d) for k, d in zip(self.keys, devices, strict=True)),
            tuple(_sent(v, d) for v, d in zip(self.values, devices, strict=True)),
        )

    def split(self, at: int) -> "tuple[Slice, Slice]":
        """Return the first `at` tokens and the rest, each with its own memory."""
        return self.cut(0, at), self.cut(at, self.length)

    def cut(self, start: int, stop: int) -> "Slice":
        """Return a copy of the tokens `[start, stop)`, with its own memory."""
        return self._mapped(lambda rows: rows[:, start:stop].clone())

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Slice":
        return Slice(tuple(map(change, self.keys)), tuple(map(change, self.values)))


def _to_host(rows: Tensor) -> Tensor:
    """Copies into pinned memory are queued, and not complete yet."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return host.copy_(rows, non_blocking=rows.is_cuda)


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    # Copies to the host must be waited for, because they are read at once.
    return rows.to(device, copy=True, non_blocking=device.type == "cuda")
