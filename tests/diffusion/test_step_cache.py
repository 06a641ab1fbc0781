"""The step cache against a plain twin of its rule and formulas; what its state must hold."""

from collections.abc import Sequence
from itertools import product
from math import comb

import pytest
import torch
from torch import Tensor

from hyimg_cli.diffusion.denoise import DenoisePlan, DenoiseState, denoise_step
from hyimg_cli.diffusion.guidance import CFG
from hyimg_cli.diffusion.schedule import Schedule
from hyimg_cli.diffusion.step_cache import VelocityCache
from hyimg_cli.spec.step_cache import StepCache, count_full

# Full steps as published code has them, by steps, interval, first and tail.
PUBLISHED = {
    (50, 5, 0, 0): [0, 5, 10, 15, 20, 25, 30, 35, 40, 45],
    (50, 5, 3, 0): [0, 1, 2, 7, 12, 17, 22, 27, 32, 37, 42, 47],
    (50, 5, 3, 1): [0, 1, 2, 7, 12, 17, 22, 27, 32, 37, 42, 47, 49],
    (50, 4, 3, 1): [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 49],
    (50, 3, 3, 1): [0, 1, *range(2, 48, 3), 49],
    (50, 2, 3, 1): [0, 1, *range(2, 50, 2), 49],
    (20, 3, 3, 1): [0, 1, 2, 5, 8, 11, 14, 17, 19],
    (8, 5, 0, 0): [0, 5],
    (8, 5, 3, 0): [0, 1, 2, 7],
    (8, 5, 3, 1): [0, 1, 2, 7],
    (8, 4, 3, 1): [0, 1, 2, 6, 7],
    (8, 3, 3, 1): [0, 1, 2, 5, 7],
    (8, 2, 3, 1): [0, 1, 2, 4, 6, 7],
}


@pytest.mark.parametrize(("numbers", "full"), PUBLISHED.items())
def test_full_steps_are_the_published_ones(
    numbers: tuple[int, int, int, int], full: list[int]
) -> None:
    steps, interval, first, tail = numbers
    rule = StepCache(interval, first=first, tail=tail)
    assert [n for n, is_full in enumerate(rule.full_steps([0] * steps)) if is_full] == full
    assert count_full(rule, steps) == len(full)


def twin_of_the_rule(rule: StepCache, networks: Sequence[object]) -> list[bool]:
    """As a counter that runs along: estimates since the last full step."""
    found, since = [], 0
    for index, network in enumerate(networks):
        is_full = index == 0 or since == rule.interval - 1
        is_full |= index < rule.first or index >= len(networks) - rule.tail
        is_full |= index > 0 and network != networks[index - 1]
        since = 0 if is_full else since + 1
        found.append(is_full)
    return found


SWITCHES = ([0] * 14, [0] * 5 + [1] * 9, [0, 1] * 7, [1] * 13 + [0], [False] * 2 + [True] * 12)
RULES = [StepCache(*numbers) for numbers in product((2, 3, 5), (0, 1, 2), (1, 3), (1, 2))]


@pytest.mark.parametrize("networks", SWITCHES)
def test_a_change_of_network_is_a_full_step(networks: list[object]) -> None:
    for rule in RULES:
        assert list(rule.full_steps(networks)) == twin_of_the_rule(rule, networks)


def carried(
    cache: VelocityCache, true: Sequence[Sequence[Tensor]], steps: range | None = None
) -> dict[int, list[Tensor]]:
    """What comes of a run in which the model says `true` at each step it is asked."""
    found = {}
    for index in steps or range(len(true)):
        if cache.steps[index]:
            cache.keep(index, true[index])
            found[index] = list(true[index])
        else:
            found[index] = list(cache.estimate(index))
    return found


def twin_of_the_estimate(
    rule: StepCache, networks: Sequence[object], true: Sequence[Sequence[Tensor]], index: int
) -> list[Tensor]:
    """Lagrange's polynomial, in float64, through the last full steps that count."""
    full = [n for n, is_full in enumerate(twin_of_the_rule(rule, networks)) if is_full]
    known = [n for n in full if rule.first - 1 <= n < index]
    since = max((n for n in range(1, index + 1) if networks[n] != networks[n - 1]), default=0)
    places = [n for n in known if n >= since][-1 - rule.order :]
    found = [torch.zeros_like(one, dtype=torch.float64) for one in true[0]]
    for own in places:
        weight = 1.0
        for other in places:
            weight *= 1 if other == own else (index - other) / (own - other)
        found = [sum_ + weight * one.double() for sum_, one in zip(found, true[own], strict=True)]
    return found


@pytest.mark.parametrize("networks", SWITCHES)
def test_estimates_are_the_polynomial_through_the_last_full_steps(networks: list[object]) -> None:
    true = [list(torch.randn(2, 1, 3, 2)) for _ in networks]
    for rule in RULES:
        cache = VelocityCache(rule, networks)
        found = carried(cache, true)
        assert (cache.full, cache.estimated) == (sum(cache.steps), 14 - sum(cache.steps))
        for index, is_full in enumerate(cache.steps):
            if not is_full:
                twin = twin_of_the_estimate(rule, networks, true, index)
                for ours, theirs in zip(found[index], twin, strict=True):
                    torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_polynomials_of_its_order_are_estimated_exactly(order: int) -> None:
    """From the step on at which as many full ones were recorded; whole numbers, so to the bit."""
    rule = StepCache(4, order)
    true = [[torch.tensor([float(comb(n, order) - 3 * n * (order > 0))])] for n in range(40)]
    found = carried(VelocityCache(rule, [0] * 40), true)
    first = rule.first - 1 + 4 * order
    assert all(torch.equal(found[n][0], true[n][0]) for n in range(first, 40))
    if order:
        assert not torch.equal(found[first - 1][0], true[first - 1][0])


def test_estimates_have_the_velocities_dtype_and_sums_are_wide() -> None:
    rule = StepCache(2, 2, first=1)
    true = [[torch.tensor([1.0 + n / 128]).bfloat16()] for n in range(12)]
    found = carried(VelocityCache(rule, [0] * 12), true)
    assert all(one.dtype == torch.bfloat16 for (one,) in found.values())
    assert torch.equal(found[7][0], true[7][0])


@pytest.mark.parametrize("stop", range(1, 14))
def test_a_state_goes_on_to_the_bit(stop: int) -> None:
    networks, rule = [0] * 8 + [1] * 6, StepCache(3, 2)
    true = [list(torch.randn(2, 3).bfloat16()) for _ in networks]
    whole = VelocityCache(rule, networks)
    expected = carried(whole, true)
    first, second = VelocityCache(rule, networks), VelocityCache(rule, networks)
    carried(first, true, range(stop))
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second.restore({"of others": torch.ones(1)} | state, torch.device("cpu"))
    found = carried(second, true, range(stop, 14))
    assert all(torch.equal(a, b) for n in found for a, b in zip(found[n], expected[n], strict=True))
    assert second.report() == whole.report()


def test_nothing_is_kept_that_no_step_will_need() -> None:
    cache = VelocityCache(StepCache(3), [0] * 12)
    true = [[torch.zeros(2)] for _ in range(12)]
    kept = []
    for index in range(12):
        carried(cache, true, range(index, index + 1))
        kept.append(len(cache.state()) - 1)
    # Warm-up steps but the last are not recorded; behind the last estimate nothing is held.
    assert kept == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0]
    assert cache.state().keys() == {"velocities.counts"}
    plain = VelocityCache(None, [0] * 12)
    carried(plain, true)
    assert (plain.state(), plain.report(), plain.full) == ({}, None, 12)


def test_rows_of_a_batch_keep_their_own_schedule() -> None:
    """Whoever draws beside it, a track asks at its own full steps, and moves to the bit as alone;
    where none is due nobody is asked.
    """
    schedule = Schedule(12, 3.0)
    rules = [None, StepCache(4), StepCache(2, 2, first=1), StepCache(3, 0)]
    noises = torch.randn(len(rules), 3, 4, 4)
    weights = torch.randn(len(rules), 2, 1, 1, 1)
    plans = [DenoisePlan(noise, schedule, CFG([2.5])) for noise in noises]

    def drawn(numbers: list[int]) -> tuple[list[Tensor], list[list[int]]]:
        asked: list[list[int]] = []

        states = {DenoiseState(plans[n], rules[n]): n for n in numbers}

        def velocities(full: Sequence[DenoiseState]) -> list[Tensor]:
            asked.append([states[one] for one in full])
            return [torch.tanh(weights[states[one]] * one.latents) for one in full]

        for _ in range(12):
            denoise_step([*states], velocities)
        return [one.latents for one in states], asked

    together, asked = drawn([0, 1, 2, 3])
    for number, rule in enumerate(rules):
        (alone,), forwards = drawn([number])
        assert torch.equal(alone, together[number])
        full = count_full(rule, 12)
        assert len(forwards) == sum(number in one for one in asked) == full
