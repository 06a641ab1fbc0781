"""Grouped experts against their plain twin and against themselves in other company."""

import pytest
import torch
from kernels import cases
from torch import nn

from hyimg_cli.kernels import rows
from hyimg_cli.kernels.choice import experts_of
from hyimg_cli.kernels.experts import RoutedTokens, plain_scaled_experts, routed_experts
from hyimg_cli.kernels.experts import plain_experts as plain_stacks
from hyimg_cli.kernels.formats import Stacks, dense
from hyimg_cli.kernels.ops import PLAIN
from hyimg_cli.kernels.rows import CANDIDATES, invariant_multiple, padding
from hyimg_cli.models.hunyuan_image3.moe import Mlp

WIDTH, INNER, EXPERTS = 64, 32, 8


def grouped_experts(tokens: RoutedTokens, stacks: Stacks) -> torch.Tensor:
    """What a CPU runs over dense stacks."""
    return experts_of(stacks)(tokens)


def _experts(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    return nn.ModuleList(Mlp(WIDTH, INNER) for _ in range(EXPERTS)).to(dtype).requires_grad_(False)


def _bank(experts: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.stack([e.gate_and_up_proj.weight for e in experts]),
        torch.stack([e.down_proj.weight for e in experts]),
    )


def _each_of_all(
    experts: nn.ModuleList, x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token, those not chosen weighted 0."""
    gates = torch.zeros(len(x), len(experts), dtype=x.dtype).scatter(1, index, weight)
    return (gates[..., None] * torch.stack([expert(x) for expert in experts], dim=1)).sum(dim=1)


def _routing(tokens: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight, index = torch.rand(tokens, EXPERTS).topk(chosen, dim=1)
    return weight / weight.sum(dim=1, keepdim=True), index


@pytest.mark.parametrize("tokens", [1, 3, 4, 17, 150])
@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_equals_the_plain_twin(tokens: int, chosen: int) -> None:
    experts, x = _experts(), torch.randn(tokens, WIDTH)
    weight, index = _routing(tokens, chosen)
    expected = _each_of_all(experts, x, weight, index)
    ours = grouped_experts(RoutedTokens(x, weight, index), _bank(experts))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_all_tokens_with_one_expert() -> None:
    experts, x = _experts(), torch.randn(30, WIDTH)
    weight, index = torch.ones(30, 1), torch.full((30, 1), 5)
    ours = grouped_experts(RoutedTokens(x, weight, index), _bank(experts))
    torch.testing.assert_close(ours, experts[5](x), atol=1e-5, rtol=1e-5)


def test_bfloat16() -> None:
    experts, x = _experts(torch.bfloat16), torch.randn(20, WIDTH, dtype=torch.bfloat16)
    weight, index = _routing(20, 2)
    expected = _each_of_all(experts, x, weight.bfloat16(), index)
    ours = grouped_experts(RoutedTokens(x, weight.bfloat16(), index), _bank(experts))
    torch.testing.assert_close(ours, expected, atol=3e-2, rtol=3e-2)


def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    experts = _bank(_experts())
    x = torch.randn(97, WIDTH)
    weight, index = _routing(97, 2)
    together = grouped_experts(RoutedTokens(x, weight, index), experts)
    for count in (1, 2, 5, 31, 64):
        rows = torch.randperm(97)[:count]
        apart = grouped_experts(RoutedTokens(x[rows], weight[rows], index[rows]), experts)
        assert torch.equal(apart, together[rows])


def test_this_machine_has_an_invariant_multiple() -> None:
    assert invariant_multiple() in CANDIDATES
    assert [padding(n, 4) for n in (1, 4, 5, 8)] == [3, 0, 3, 0]


def test_a_multiple_is_tried_at_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose rows change their bits at 12 rows and 20 is not invariant by fours."""

    def odd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x), len(weight)), float(len(x) % 8 and len(x) > 8))

    monkeypatch.setattr(rows.F, "linear", odd)
    assert rows.invariant_multiple.__wrapped__() == 8


@pytest.mark.parametrize("tokens", [1, 4, 17])
def test_the_kernels_share_one_call_and_one_answer(tokens: int) -> None:
    arguments = cases.call(tokens).arguments
    expected = grouped_experts(*arguments)
    torch.testing.assert_close(plain_stacks(*arguments), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(routed_experts(*arguments), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["fp8", "nf4"])
def test_many_rows_of_a_quantised_stack_are_those_of_its_dense_weights(form: str) -> None:
    case = cases.call(40, form=form)
    stacks = dense(case.gate_and_up, torch.float32), dense(case.down, torch.float32)
    expected = grouped_experts(case.tokens, stacks)
    torch.testing.assert_close(routed_experts(*case.arguments), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(plain_stacks(*case.arguments), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("multiple", [1, 16])
def test_every_choice_stands_in_its_experts_group(multiple: int) -> None:
    index = torch.rand(23, 8).topk(3, dim=1).indices
    index[index == 5] = 4
    to = PLAIN.align_block_size(index, 8, multiple)
    assert to.ends_E.dtype == torch.int32
    assert (to.ends_E % multiple == 0).all()
    starts = to.ends_E - to.ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32))
    for token, choice in ((t, k) for t in range(23) for k in range(3)):
        row = to.row_TK[token, choice]
        assert to.token_R[row] == token
        assert starts[index[token, choice]] <= row < to.ends_E[index[token, choice]]
    assert to.row_TK.unique().numel() == 23 * 3


def test_rounding_the_rows_too_costs_a_little_more() -> None:
    """e4m3 keeps four bits: weights alone are off by some 2 %, both factors by more."""
    exact = cases.call(64, width=128, inner=64)
    assert isinstance(exact.gate_and_up, torch.Tensor)
    assert isinstance(exact.down, torch.Tensor)
    held = tuple(cases.held(s, "fp8", torch.float32) for s in (exact.gate_and_up, exact.down))
    expected = grouped_experts(*exact.arguments)
    weights = cases.relative(plain_stacks(exact.tokens, held), expected)
    both = cases.relative(plain_scaled_experts(exact.tokens, held), expected)
    assert 0.01 < weights < both < 0.08


@pytest.mark.parametrize("form", cases.FORMATS)
def test_on_a_cpu_a_row_is_the_same_to_the_bit_in_any_company(form: str) -> None:
    case = cases.call(61, form=form)
    compute = experts_of(case.stacks)
    together = compute(case.tokens)
    for count in (1, 2, 5, 11, 31):
        rows = torch.randperm(61)[:count]
        apart = compute(RoutedTokens(case.x_TM[rows], case.weight_TK[rows], case.index_TK[rows]))
        assert torch.equal(apart, together[rows])
