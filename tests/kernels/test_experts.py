"""Grouped experts against their plain twin and against themselves in other company."""

import pytest
import torch
from torch import nn

from hyimg_cli.kernels.experts import grouped_experts
from hyimg_cli.kernels.rows import CANDIDATES, invariant_multiple, padding
from hyimg_cli.models.hunyuan_image3.moe import Mlp, plain_experts

WIDTH, INNER, EXPERTS = 64, 32, 8


def _experts(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    return nn.ModuleList(Mlp(WIDTH, INNER) for _ in range(EXPERTS)).to(dtype).requires_grad_(False)


def _bank(experts: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.stack([e.gate_and_up_proj.weight for e in experts]),
        torch.stack([e.down_proj.weight for e in experts]),
    )


def _routing(tokens: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight, index = torch.rand(tokens, EXPERTS).topk(chosen, dim=1)
    return weight / weight.sum(dim=1, keepdim=True), index


@pytest.mark.parametrize("tokens", [1, 3, 4, 17, 150])
@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_equals_the_plain_twin(tokens: int, chosen: int) -> None:
    experts, x = _experts(), torch.randn(tokens, WIDTH)
    weight, index = _routing(tokens, chosen)
    expected = plain_experts(experts, x, weight, index)
    ours = grouped_experts(x, weight, index, *_bank(experts))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_all_tokens_with_one_expert() -> None:
    experts, x = _experts(), torch.randn(30, WIDTH)
    weight, index = torch.ones(30, 1), torch.full((30, 1), 5)
    ours = grouped_experts(x, weight, index, *_bank(experts))
    torch.testing.assert_close(ours, experts[5](x), atol=1e-5, rtol=1e-5)


def test_bfloat16() -> None:
    experts, x = _experts(torch.bfloat16), torch.randn(20, WIDTH, dtype=torch.bfloat16)
    weight, index = _routing(20, 2)
    expected = plain_experts(experts, x, weight.bfloat16(), index)
    ours = grouped_experts(x, weight.bfloat16(), index, *_bank(experts))
    torch.testing.assert_close(ours, expected, atol=3e-2, rtol=3e-2)


def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    experts = _bank(_experts())
    x = torch.randn(97, WIDTH)
    weight, index = _routing(97, 2)
    together = grouped_experts(x, weight, index, *experts)
    for count in (1, 2, 5, 31, 64):
        rows = torch.randperm(97)[:count]
        apart = grouped_experts(x[rows], weight[rows], index[rows], *experts)
        assert torch.equal(apart, together[rows])


def test_this_machine_has_an_invariant_multiple() -> None:
    assert invariant_multiple() in CANDIDATES
    assert [padding(n, 4) for n in (1, 4, 5, 8)] == [3, 0, 3, 0]
