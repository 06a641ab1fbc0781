"""Routed experts against every expert computed for every token."""

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_equals_all_experts_weighted(small_network: Any, tokens: int) -> None:
    moe = small_network.model.layers[2].mlp
    x = torch.randn(tokens, small_network.arch.hidden_size)
    _, weights, index = moe.gate(x)
    gates = torch.zeros(tokens, len(moe.experts)).scatter(1, index, weights)
    every = torch.stack([expert(x) for expert in moe.experts], dim=1)
    expected = moe.shared_mlp(x) + (gates[..., None] * every).sum(dim=1)
    torch.testing.assert_close(moe(x), expected, atol=1e-6, rtol=1e-5)


def test_weights_add_up_to_one_and_choose_distinct_experts(small_network: Any) -> None:
    _, weights, index = small_network.model.layers[0].mlp.gate(
        torch.randn(50, small_network.arch.hidden_size)
    )
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))
    assert all(len(set(row)) == len(row) for row in index.tolist())


def test_a_token_does_not_depend_on_its_neighbours(small_network: Any) -> None:
    moe = small_network.model.layers[0].mlp
    x = torch.randn(20, small_network.arch.hidden_size)
    alone = torch.cat([moe(row[None]) for row in x])
    torch.testing.assert_close(moe(x), alone, atol=1e-6, rtol=1e-5)
