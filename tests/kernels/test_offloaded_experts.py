"""Experts in main memory: the same bits as on the device, and no unnecessary fetches."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyimg_cli.kernels import offloaded_experts
from hyimg_cli.kernels.choice import experts_of
from hyimg_cli.kernels.experts import RoutedTokens
from hyimg_cli.kernels.formats import Stack, Stacks, empty_stack
from hyimg_cli.kernels.offloaded_experts import ExpertCache, OffloadedExperts
from hyimg_cli.kernels.transfer import unlock

CPU = torch.device("cpu")
EXPERTS, WIDTH, INNER, CHOSEN = 8, 64, 32, 2


class OracleLru:
    """Least recently used first out, by a list in the order of use."""

    def __init__(self, count: int) -> None:
        self.order: list[Any] = []
        self.count = count

    def missing(self, wanted: Sequence[Any]) -> set[Any]:
        missed = {key for key in wanted if key not in self.order}
        kept = [key for key in self.order if key not in wanted]
        self.order = [*kept, *wanted][-self.count :]
        return missed


def _key_lists(seed: int, count: int) -> Iterator[list[tuple[int, int]]]:
    chance = random.Random(seed)
    for step in range(200):
        wanted = chance.sample(range(6), chance.randint(1, min(6, count)))
        yield [(step % 3, expert) for expert in wanted]


@pytest.mark.parametrize("count", [1, 3, 7, 18, 30])
def test_residents_are_those_of_an_lru(count: int) -> None:
    residents, oracle = ExpertCache(count), OracleLru(count)
    slot_of: dict[Any, int] = {}
    for wanted in _key_lists(count, count):
        expected = oracle.missing(wanted)
        slots, missing = residents.place(wanted)
        assert {wanted[number] for number in missing} == expected
        slot_of |= dict(zip(wanted, slots, strict=True))
        held = {key: residents.slot_of(key) for key in oracle.order}
        assert held == {key: slot_of[key] for key in oracle.order}, "nobody is moved"
        assert len(set(held.values())) == len(held) <= count


def _layers(form: Any, count: int = 3) -> list[tuple[Stack, Stack]]:
    generator = torch.Generator().manual_seed(5)

    def stack(rows: int, width: int) -> Stack:
        dense = torch.randn(EXPERTS, rows, width, generator=generator)
        if form == "dense":
            return dense
        held = empty_stack(form, EXPERTS, rows, width, CPU)
        for number, weight in enumerate(dense):
            held.put(number, weight)
        return held

    return [(stack(2 * INNER, WIDTH), stack(WIDTH, INNER)) for _ in range(count)]


def _rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(count)]
    )
    return (
        torch.randn(count, WIDTH, generator=generator),
        torch.rand(count, CHOSEN, generator=generator),
        index,
    )


@pytest.mark.parametrize(
    ("form", "resident"), [("dense", 0), ("dense", 5), ("dense", 24), ("fp8", 5), ("nf4", 5)]
)
def test_every_row_has_the_bits_that_it_has_on_the_device(form: Any, resident: int) -> None:
    """Prefill, decode steps of one row and of two, prefill again, layer by layer."""
    layers = _layers(form)
    held = OffloadedExperts(layers, CPU, 0).expert_bytes
    outside = OffloadedExperts(layers, CPU, resident * held)
    assert outside.cache.count == resident
    for step, rows in enumerate((66, 1, 2, 66)):
        for number, pair in enumerate(layers):
            x, weight, index = _rows(rows, 10 * step + number)
            onto = None if step % 2 else x
            expected = experts_of(pair)(RoutedTokens(x, weight, index, onto))
            assert torch.equal(
                outside.of_layer(number)(RoutedTokens(x, weight, index, onto)), expected
            )


def _fetched(outside: OffloadedExperts, rows: Sequence[Any], layers: int) -> Iterator[int]:
    """What each decode step over all layers fetches."""
    for x, weight, index in rows:
        before = outside.fetched
        for number in range(layers):
            outside.of_layer(number)(RoutedTokens(x, weight, index))
        yield outside.fetched - before


@pytest.mark.parametrize(("slots", "rows"), [(9, 1), (15, 2), (24, 1), (24, 2)])
def test_decode_steps_fetch_what_an_lru_lacks(slots: int, rows: int) -> None:
    layers = _layers("dense")
    outside = OffloadedExperts(layers, CPU, slots * OffloadedExperts(layers, CPU, 0).expert_bytes)
    steps, oracle = [_rows(rows, seed) for seed in range(40)], OracleLru(slots)
    expected = [
        sum(
            len(oracle.missing([(layer, e) for e in sorted(set(index.flatten().tolist()))]))
            for layer in range(len(layers))
        )
        for _, _, index in steps
    ]
    assert list(_fetched(outside, steps, len(layers))) == expected
    if slots == 24:
        assert sum(expected) <= 24, "what fits is fetched once"


@pytest.mark.parametrize("slots", [3, 9, 18])
def test_a_step_that_wants_more_than_the_slots_finds_there_what_stays(slots: int) -> None:
    """As a plan reckons. By an LRU nothing would be found: what a layer has left there is gone when
    its turn comes again.
    """
    layers = _layers("dense")
    outside = OffloadedExperts(layers, CPU, slots * OffloadedExperts(layers, CPU, 0).expert_bytes)
    counts = list(_fetched(outside, [_rows(16, seed) for seed in range(4)], 3))
    assert counts[-1] == 3 * EXPERTS - slots
    keys = [[(layer, expert) for expert in range(EXPERTS)] for layer in range(3)]
    held = [sum(outside.cache.slot_of(key) is not None for key in own) for own in keys]
    assert held == [slots // 3] * 3


def test_rows_that_decode_together_share_a_fetch() -> None:
    layers = _layers("dense")
    room = 24 * OffloadedExperts(layers, CPU, 0).expert_bytes
    x, weight, index = _rows(1, 0)
    together = [t.repeat(16, 1) for t in (x, weight, index)]
    (of_one,) = _fetched(OffloadedExperts(layers, CPU, room), [(x, weight, index)], 3)
    (of_many,) = _fetched(OffloadedExperts(layers, CPU, room), [together], 3)
    assert of_one == of_many == 3 * CHOSEN


def test_without_residents_a_decode_step_still_fetches_the_chosen_alone() -> None:
    """As a plan reckons for a card that has room for two layers and no more."""
    outside = OffloadedExperts(_layers("dense"), CPU, 0)
    assert list(_fetched(outside, [_rows(1, seed) for seed in range(4)], 3)) == [3 * CHOSEN] * 4


def test_a_room_that_held_another_layers_chosen_experts_is_filled_anew() -> None:
    layers = _layers("dense", count=2)
    outside = OffloadedExperts(layers, CPU, 0)
    for number, rows in ((0, 66), (1, 1), (0, 66)):
        x, weight, index = _rows(rows, rows)
        expected = experts_of(layers[number])(RoutedTokens(x, weight, index))
        assert torch.equal(outside.of_layer(number)(RoutedTokens(x, weight, index)), expected)


def test_a_whole_layer_is_fetched_once_ahead_and_residents_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloaded_experts, "MOST_ROUTED_ROWS", 0)
    layers = _layers("dense")
    outside = OffloadedExperts(layers, CPU, 10 * OffloadedExperts(layers, CPU, 0).expert_bytes)
    counts = list(_fetched(outside, [_rows(4, seed) for seed in range(3)], 3))
    # The layer that comes next is there when its turn comes; ten experts stay from the first pass,
    # four of them its own.
    assert counts == [4 * EXPERTS - 4, 3 * EXPERTS - 10, 3 * EXPERTS - 10]
    assert sorted(one.layer or 0 for one in outside._staging) != [1, 1]


def test_what_a_kernel_is_given_are_the_chosen_experts_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that makes all weights dense that it is given would work on a layer for a token."""
    given = []

    def seen(stacks: Stacks) -> Any:
        given.append(stacks[0].shape[0])
        return experts_of(stacks)

    layers = _layers("fp8")
    outside = OffloadedExperts(layers, CPU, 0)
    monkeypatch.setattr(offloaded_experts, "experts_of", seen)
    list(_fetched(outside, [_rows(1, seed) for seed in range(3)], 3))
    assert given == [CHOSEN], "made once"


def test_copies_on_their_way_end_before_memory_is_unlocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[Any] = []
    link = SimpleNamespace(synchronize=lambda: order.append("waited"))
    runtime = SimpleNamespace(cudaHostUnregister=order.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    unlock(link, [1, 2])
    assert order == ["waited", 1, 2]
