"""Drawing tokens for many rows at once, against transformers' warpers row by row."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyimg_cli.pipelines.image import sampling
from hyimg_cli.pipelines.image.sampling import Draw, choose, uniform_numbers

WORDS = 64
GRID = torch.linspace(0, 1 - 2**-24, 400).tolist()


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(seed))


def _warped(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(draw.temperature)])
    if draw.top_k:
        warpers.append(TopKLogitsWarper(draw.top_k))
    if draw.top_p < 1:
        warpers.append(TopPLogitsWarper(draw.top_p))
    no_history = cast(Any, torch.zeros(1, 0, dtype=torch.long))
    warped: torch.Tensor = warpers(no_history, cast(Any, logits[None].clone()))[0]
    return warped.softmax(dim=-1)


def _chosen(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    return choose(logits.clone(), draws).tolist()


settings = st.builds(
    Draw,
    temperature=st.sampled_from([0.3, 0.6, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 10, 500]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
)


@given(settings, st.integers(0, 50))
def test_an_even_grid_of_draws_gives_the_warpers_probabilities(plain: Draw, seed: int) -> None:
    """Over an even grid of uniform numbers each token comes as often as its probability says, and
    one that the warpers leave out never."""
    logits = _logits(seed)
    draws = [Draw(plain.temperature, plain.top_k, plain.top_p, uniform) for uniform in GRID]
    counts = torch.tensor(_chosen(logits.expand(len(GRID), -1), draws)).bincount(minlength=WORDS)
    expected = _warped(logits[0], plain)
    assert not counts[expected == 0].any()
    # A cell of the grid may fall to either side of each border between two tokens.
    assert (counts / len(GRID) - expected).abs().max() <= 1.5 / len(GRID) + 1e-5


@given(settings, st.integers(0, 50))
def test_a_gpus_sums_choose_the_same_and_know_no_order(plain: Draw, seed: int) -> None:
    logits = _logits(seed)
    draws = [Draw(plain.temperature, plain.top_k, plain.top_p, uniform) for uniform in GRID]
    rows = logits.expand(len(GRID), -1)
    expected = _chosen(rows, draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_running_sums", sampling._whole_sums)
        found = _chosen(rows, draws)
    # The last uniform number is as near to one as a float32 sum is to the whole.
    assert found[:-1] == expected[:-1]
    weights = logits.softmax(dim=-1)
    assert sampling._whole_sums(weights)[0, -1] == sampling._whole_sums(weights.flip(1))[0, -1]


@given(st.lists(st.tuples(settings, st.integers(0, 50)), min_size=1, max_size=9))
def test_a_row_does_not_depend_on_its_company(rows: list[tuple[Draw, int]]) -> None:
    draws = [Draw(d.temperature, d.top_k, d.top_p, (seed % 7) / 7) for d, seed in rows]
    logits = torch.cat([_logits(seed) for _, seed in rows])
    alone = [_chosen(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]
    assert _chosen(logits, draws) == alone


@pytest.mark.parametrize("company", [[], [Draw(1.0, 0, 1.0, 0.5)]], ids=["greedy", "mixed"])
def test_the_best_is_taken_where_that_is_asked(company: list[Draw]) -> None:
    logits = _logits(3, 2 + len(company))
    logits[0, [5, 9]] = logits.max() + 1  # of equals the first
    allowed = (4, 7, 40)
    draws = [Draw(0.0, 0, 1.0, 0.9), Draw(0.8, 0, 1.0, 0.9, allowed), *company]
    best, restricted, *_ = _chosen(logits, draws)
    assert best == 5
    assert restricted == max(allowed, key=lambda id_: logits[1, id_].item())


def test_equal_logits_are_drawn_alike() -> None:
    draws = [Draw(1.0, 0, 1.0, (n + 0.5) / WORDS) for n in range(WORDS)]
    assert _chosen(torch.zeros(WORDS, WORDS), draws) == list(range(WORDS))


def test_draws_come_from_the_seed_and_their_number_alone() -> None:
    assert uniform_numbers(1, 40)[:7] == uniform_numbers(1, 7)
    assert uniform_numbers(1, 7) != uniform_numbers(2, 7)
    assert all(0 <= uniform < 1 for uniform in uniform_numbers(1, 40))
