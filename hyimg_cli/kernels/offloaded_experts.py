"""Keep experts' weights in main memory if the device has no memory for all of them.

    many rows   a whole layer into one of two buffers, while the layer before it is at work in the
                other; what is resident is copied on the device
    few rows    the chosen experts alone, into slots that the least recently used leave; where all
                layers choose more than there are slots, side by side into a room

Resident experts fill the slots that the device has memory for, equally many of each layer. A step
that chooses more experts over all layers than there are slots leaves the slots unchanged: if they
were used in turn, each expert would be evicted before its layer's next turn. Rows that are decoded
together share the fetched experts. The kernels are the same as for experts on the device, with a
slot's number in place of an expert's, and no bit depends on an expert's location.
"""

# Legend: T token, M model width, K chosen expert, E expert
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hyimg_cli.kernels.choice import ByRows, experts_of
from hyimg_cli.kernels.experts import Experts, RoutedTokens
from hyimg_cli.kernels.formats import Stacks
from hyimg_cli.kernels.transfer import lock, to_device, unlock

# Up to this many rows, the chosen experts are fetched one by one: with more rows, nearly all are
# chosen.
MOST_ROUTED_ROWS = 64


class ExpertCache:
    """Assignment of keys to `count` slots; evicts the least recently used key."""

    def __init__(self, count: int) -> None:
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        self._free = list(range(count))[::-1]
        self.count = count

    def place(self, wanted: Sequence[Hashable]) -> tuple[list[int], list[int]]:
        """Return a slot for each distinct `wanted` key, and the indices of the missing ones."""
        assert len(wanted) <= self.count, "what is wanted together fits together"
        missing = [number for number, key in enumerate(wanted) if key not in self._slots]
        for key in wanted:  # none of them is evicted for another
            if key in self._slots:
                self._slots.move_to_end(key)
        for number in missing:
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[wanted[number]] = slot
        for key in wanted:
            self._slots.move_to_end(key)
        return [self._slots[key] for key in wanted], missing

    def slot_of(self, key: Hashable) -> int | None:
        """Return the slot of `key`, or None; does not count as a use."""
        return self._slots.get(key)

    def free_slot(self, key: Hashable) -> int | None:
        """Assign an unused slot to `key` and return it; None if none is left."""
        if not self._free or key in self._slots:
            return None
        self._slots[key] = slot = self._free.pop()
        return slot


@dataclass
class StagingBuffer:
    """Memory on the device for a whole layer, the layer in it, and that layer's computation."""

    stacks: Stacks
    compute: Experts
    layer: int | None = None
    is_there: torch.cuda.Event | None = None


class OffloadedExperts:
    """All layers' experts. `fetched`: matrices that came over the link so far."""

    def __init__(self, layers: Sequence[Stacks], device: torch.device, resident_bytes: int) -> None:
        """Hold all layers' experts; `layers` has both stacks of each, in main memory, of one shape.

        `resident_bytes`: device memory for experts, in addition to the two buffers.
        """
        self._layers, self._device = layers, device
        self.count = layers[0][0].shape[0]
        self.expert_bytes = sum(part.nbytes for part in _parts(layers[0])) // self.count

        def empty(count: int) -> Stacks:
            """Return stacks of `count` experts on the device, in the form of the layers'."""
            return _remake(
                layers[0], lambda part: part.new_zeros(count, *part.shape[1:], device=device)
            )

        both = empty(self.count), empty(self.count)
        self._staging = [StagingBuffer(stacks, experts_of(stacks)) for stacks in both]
        slots = min(resident_bytes // self.expert_bytes, len(layers) * self.count)
        self._pool = empty(max(1, slots))
        by_slot = experts_of(self._pool)
        self._by_slot = by_slot.few if isinstance(by_slot, ByRows) else by_slot
        # Another kernel would read all slots, which are many more than a layer's experts.
        self._reads_chosen = device.type != "cuda" or isinstance(by_slot, ByRows)
        self._by_count: dict[int, Experts] = {}
        self.cache = ExpertCache(slots)
        self.fetched = 0
        self._link = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._link is not None:
            locked = lock([part for stacks in layers for part in _parts(stacks)], device)
            # The last layer has started a copy of the first. The copy must end before its buffers
            # become another model's memory, and memory must be unlocked before the system gets it
            # back.
            weakref.finalize(self, unlock, self._link, locked).atexit = False

    def of_layer(self, layer: int) -> Experts:
        """Return the computation of one layer's experts."""
        return partial(self._computed, layer)

    def _computed(self, layer: int, tokens: RoutedTokens) -> Tensor:
        index_TK = tokens.index_TK
        if len(index_TK) <= MOST_ROUTED_ROWS:
            chosen = sorted(set(index_TK.flatten().tolist()))
            if self._reads_chosen and len(chosen) * len(self._layers) <= self.cache.count:
                slots, missing = self.cache.place([(layer, expert) for expert in chosen])
                if missing:
                    self._wait_for_link()  # it may be copying the resident experts into a room
                for number in missing:
                    self._fetch(layer, chosen[number], self._pool, slots[number])
                slot_TK = self._numbers(chosen, slots)[index_TK]
                return self._by_slot(replace(tokens, index_TK=slot_TK))
            if len(chosen) <= self.count // 2:
                place_TK = self._numbers(chosen, range(len(chosen)))[index_TK]
                return self._partly(layer, chosen)(replace(tokens, index_TK=place_TK))
        staging = self._begin(layer, None)
        if staging.is_there is not None:
            # Now, or once the work before it is done.
            torch.cuda.current_stream(self._device).wait_event(staging.is_there)
        self._begin((layer + 1) % len(self._layers), staging)
        out_TM = staging.compute(tokens)
        self._fill_free_slots(staging, layer, range(self.count))
        return out_TM

    def _numbers(self, chosen: Sequence[int], places: Sequence[int]) -> Tensor:
        """Return the place of each chosen expert, by its number, [E]."""
        place_of = dict(zip(chosen, places, strict=True))
        return to_device([place_of.get(expert, 0) for expert in range(self.count)], self._device)

    def _partly(self, layer: int, chosen: Sequence[int]) -> Experts:
        """Return the computation over a staging buffer that begins with the chosen experts.

        A kernel that reads all of its buffer then reads only these.
        """
        staging, count = self._staging[0], len(chosen)
        staging.layer = None
        self._wait_for_link()  # it may be filling the room
        self._fill(staging, layer, chosen)
        self._fill_free_slots(staging, layer, chosen)
        if count not in self._by_count:
            # The first experts of the buffer, in place.
            first = _remake(staging.stacks, lambda part: part[:count])
            self._by_count[count] = experts_of(first)
        return self._by_count[count]

    def _wait_for_link(self) -> None:
        if self._link is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._link)

    def _begin(self, layer: int, busy: StagingBuffer | None) -> StagingBuffer:
        """Return the staging buffer that holds or will hold the layer: one that is not `busy`."""
        there = [staging for staging in self._staging if staging.layer == layer]
        free = [staging for staging in self._staging if staging is not busy]
        staging = (there or free)[0]
        if there:
            return staging
        staging.layer = layer
        if self._link is None:
            self._fill(staging, layer, range(self.count))
            return staging
        # The computing stream is the last to use the resident experts and the buffer.
        self._link.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._link):
            self._fill(staging, layer, range(self.count))
            staging.is_there = self._link.record_event()
        return staging

    def _fill(self, staging: StagingBuffer, layer: int, experts: Sequence[int]) -> None:
        """Copy a layer's experts side by side into a staging buffer, by slots or over the link."""
        for place, expert in enumerate(experts):
            slot = self.cache.slot_of((layer, expert))
            if slot is None:
                self._fetch(layer, expert, staging.stacks, place)
            else:
                _copy(self._pool, slot, staging.stacks, place)

    def _fill_free_slots(self, staging: StagingBuffer, layer: int, experts: Sequence[int]) -> None:
        """Fill free slots from a staging buffer, so that a model that never decodes also keeps
        some.

        Each layer gets its share; otherwise the link would be idle for some layers and a bottleneck
        for others.
        """
        share = -(-self.cache.count // len(self._layers))
        for place, expert in enumerate(experts):
            slot = self.cache.free_slot((layer, expert)) if expert < share else None
            if slot is not None:
                _copy(staging.stacks, place, self._pool, slot)

    def _fetch(self, layer: int, expert: int, to: Stacks, place: int) -> None:
        _copy(self._layers[layer], expert, to, place)
        self.fetched += 1


def _parts(stacks: Stacks) -> list[Tensor]:
    """Return every tensor of both stacks."""
    parts: list[Tensor] = []
    for stack in stacks:
        parts += [stack] if isinstance(stack, Tensor) else stack.tensors
    return parts


def _remake(stacks: Stacks, change: Callable[[Tensor], Tensor]) -> Stacks:
    """Return stacks of the same form with other tensors."""
    gate_and_up, down = (
        change(stack) if isinstance(stack, Tensor) else stack.transform(change) for stack in stacks
    )
    return gate_and_up, down


def _copy(source: Stacks, number: int, target: Stacks, place: int) -> None:
    for part, room in zip(_parts(source), _parts(target), strict=True):
        room[place].copy_(part[number], non_blocking=True)
