"""One branch's keys and values: contiguous, preallocated, never moved.

    slots  0 ............... length ............ capacity
           [ committed prefix ][ scratch         ]
             prefill, decode     timestep and image tokens, rewritten by every denoise step

Memory is laid out head by head, [H, S, D]. Writes are copies into slices, reads are views. `length`
counts committed tokens only; positions for RoPE are a separate matter and never derived from it.
"""

# Legend: S slot, H kv head, D head width, T new token
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """K/V of some tokens, [H, S, D] per layer, outside any buffer: the unit that the tree keeps."""

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
        return self._mapped(lambda rows_HSD: rows_HSD[:, start:stop].clone())

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Slice":
        return Slice(tuple(map(change, self.keys)), tuple(map(change, self.values)))


def _to_host(rows: Tensor) -> Tensor:
    """Copies into pinned memory are queued, and not complete yet."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return host.copy_(rows, non_blocking=rows.is_cuda)


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    # Copies to the host must be waited for, because they are read at once.
    return rows.to(device, copy=True, non_blocking=device.type == "cuda")


class Buffer:
    """K/V of one branch for every layer, on that layer's device."""

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        """`devices` has one entry a layer."""

        def allocate(device: torch.device) -> Tensor:
            return torch.empty(kv_heads, capacity, head_dim, dtype=dtype, device=device)

        self.keys_HSD = [allocate(device) for device in devices]
        self.values_HSD = [allocate(device) for device in devices]
        self.capacity = capacity
        self.length = 0
        # Buffers in the same memory, and this one's rows there that another may overwrite.
        self._in_here: list[ref[Buffer]] = [ref(self)]
        self._own: tuple[int, Slice] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all keys and values."""
        return sum(t.nbytes for t in (*self.keys_HSD, *self.values_HSD))

    def write(self, layer: int, start: int, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Write new rows into the slots from `start` on, in the buffer's dtype."""
        if self._own is not None:
            at, kept = self._own
            self.keys_HSD[layer][:, at : self.length] = kept.keys[layer]
            self.values_HSD[layer][:, at : self.length] = kept.values[layer]
        stop = start + len(keys_THD)
        self.keys_HSD[layer][:, start:stop] = keys_THD.transpose(0, 1)
        self.values_HSD[layer][:, start:stop] = values_THD.transpose(0, 1)

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `stop` keys and values, [H, stop, D]."""
        return self.keys_HSD[layer][:, :stop], self.values_HSD[layer][:, :stop]

    def commit(self, length: int) -> None:
        """Make `[0, length)` the prefix; rows after it are scratch."""
        assert self.length <= length <= self.capacity, "a prefix only grows, within its buffer"
        self.length = length

    def truncate(self, length: int) -> None:
        """Shorten the prefix to `length`; rows after it are scratch again."""
        assert 0 <= length <= self.length, "only what is committed can be cut off"
        self.length = length

    def cut(self, start: int, stop: int) -> "Slice":
        """Return a copy of the committed tokens `[start, stop)`, with its own memory."""
        assert stop <= self.length, "only committed tokens can be shared"
        return Slice(tuple(self.keys_HSD), tuple(self.values_HSD)).cut(start, stop)

    def extend(self, rows: "Slice") -> None:
        """Append a slice to the prefix."""
        stop = self.length + rows.length
        for layer, (keys_HSD, values_HSD) in enumerate(zip(rows.keys, rows.values, strict=True)):
            self.keys_HSD[layer][:, self.length : stop] = keys_HSD
            self.values_HSD[layer][:, self.length : stop] = values_HSD
        self.commit(stop)

    def alias(self, prefix: int) -> "Buffer":
        """Return a buffer in this one's memory, whose prefix is its first `prefix` tokens.

        Their scratch is shared. So a layer must be read right after it was written, before another
        buffer writes; each write first restores its buffer's rows after the shortest prefix of all.
        Alias before any scratch is written.
        """
        assert prefix <= self.length, "only committed tokens can be shared"
        other = copy(self)
        other.length = prefix
        self._in_here.append(ref(other))
        alive = [one for known in self._in_here if (one := known()) is not None]
        shortest = min(one.length for one in alive)
        for one in alive:
            is_longer = one.length > shortest
            one._own = (shortest, one.cut(shortest, one.length)) if is_longer else None
        return other

    def copy_prefix(self, other: "Buffer", prefix: int) -> None:
        """Copy another buffer's first `prefix` tokens, and make them the prefix."""
        assert prefix <= other.length, "only committed tokens can be shared"
        for layer, (keys_HSD, values_HSD) in enumerate(
            zip(other.keys_HSD, other.values_HSD, strict=True)
        ):
            self.keys_HSD[layer][:, :prefix] = keys_HSD[:, :prefix]
            self.values_HSD[layer][:, :prefix] = values_HSD[:, :prefix]
        self.length = prefix
