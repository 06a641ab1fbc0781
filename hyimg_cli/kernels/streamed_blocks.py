"""Bring a network's blocks to the device one after another; their weights stay in main memory.

    block n     works on its copy, then drops it: weights are only read, so nothing goes back
    block n+1   comes at the same time on another stream, as one copy of locked memory

At most two blocks are on the device. The host never waits: copies wait until the block that last
used their memory has finished, and each block waits for its own copy.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from hyimg_cli.kernels.transfer import lock, tensors_of, unlock

# Kernels read weights at such addresses fastest.
_ALIGNMENT = 256


class StreamedBlocks:
    """Blocks of a network, in the order in which its first forward calls them."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """Lock the blocks' weights in main memory; from now on each comes when it is called."""
        self.blocks, self._device = blocks, device
        self._link = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._packs = [[PackedWeights(tensors_of(block))] for block in blocks]
        self._lock(list(chain.from_iterable(self._packs)))
        # What is on the device: at most the block at work and the next one; when its copy is done.
        self._here: dict[int, torch.cuda.Event | None] = {}
        self._next = {number: (number + 1) % len(blocks) for number in range(len(blocks))}
        self._last: int | None = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(_Begin(self, number))

    def begin(self, number: int) -> None:
        """Make a block ready for its call, and start to copy the one that followed it last time."""
        if self._last is None:  # after a forward, the next one begins with this block, too
            self._next[len(self.blocks) - 1] = number
        else:
            self._next[self._last] = number
        self._last = number
        for other in [*self._here]:
            if other != number:
                self._drop(other)
        if number not in self._here:
            self._onload(number)
        self._wait_for(number)
        if self._next[number] != number:
            self._onload(self._next[number])

    def unload(self) -> None:
        """Free the device's memory; the next call brings its block again."""
        for number in [*self._here]:
            self._drop(number)
        self._last = None

    def _onload(self, number: int) -> None:
        self._pack_new(number)
        packs, link = self._packs[number], self._link
        # Memory of the stream at work: other memory would not be free for its activations.
        copies = [torch.empty_like(pack.memory, device=self._device) for pack in packs]
        on_link: AbstractContextManager[object] = nullcontext()
        if link is not None:
            # That memory may be of a block whose work is still queued.
            link.wait_stream(torch.cuda.current_stream(self._device))
            on_link = torch.cuda.stream(link)
        with on_link:
            for pack, copy in zip(packs, copies, strict=True):
                pack.use(copy.copy_(pack.memory, non_blocking=True))
        self._here[number] = None if link is None else link.record_event()

    def _wait_for(self, number: int) -> None:
        if (is_there := self._here[number]) is not None:
            torch.cuda.current_stream(self._device).wait_event(is_there)

    def _drop(self, number: int) -> None:
        self._wait_for(number)  # of a copy that no block has used: it may still be going on
        del self._here[number]
        for pack in self._packs[number]:
            pack.use(pack.memory)

    def _pack_new(self, number: int) -> None:
        """Pack weights that a block has got since its last call, as of a LoRA; forget lost ones."""
        own = {id(tensor): tensor for tensor in tensors_of(self.blocks[number])}
        packs = [pack for pack in self._packs[number] if not own.keys().isdisjoint(pack.keys)]
        packed = set[int]().union(*(pack.keys for pack in packs))
        if new := [tensor for key, tensor in own.items() if key not in packed]:
            packs.append(PackedWeights(new))
            self._lock(packs[-1:])
        self._packs[number] = packs

    def _lock(self, packs: "Sequence[PackedWeights]") -> None:
        if self._link is not None:
            locked = lock([pack.memory for pack in packs], self._device)
            for pack, pointer in zip(packs, locked, strict=False):  # the first ones, if not all
                weakref.finalize(pack, unlock, self._link, [pointer]).atexit = False


class _Begin:
    """The hook of a block; what it does is not compiled with the block."""

    def __init__(self, blocks: StreamedBlocks, number: int) -> None:
        self._blocks, self._number = blocks, number

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _block: nn.Module, _inputs: object) -> None:
        self._blocks.begin(self._number)


class PackedWeights:
    """Tensors side by side in one piece of main memory, `memory`. `keys`: their ids."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Move the tensors' data into that memory."""
        self._tensors, self._starts, stop = tensors, list[int](), 0
        self.keys = {id(tensor) for tensor in tensors}
        for tensor in tensors:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            self._starts.append(start)
            stop = start + tensor.nbytes
        self.memory = torch.empty(stop, dtype=torch.uint8)
        self._layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        for tensor, view in zip(tensors, self._views(self.memory), strict=True):
            view.copy_(tensor.data)
        self.use(self.memory)

    def use(self, memory: Tensor) -> None:
        """Make the tensors' data views of these bytes."""
        for tensor, view in zip(self._tensors, self._views(memory), strict=True):
            tensor.data = view

    def _views(self, memory: Tensor) -> list[Tensor]:
        return [
            memory[start : start + layout.nbytes]
            .view(layout.dtype)
            .as_strided(layout.shape, layout.stride())
            for start, layout in zip(self._starts, self._layouts, strict=True)
        ]
