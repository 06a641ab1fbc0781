"""Each kernel against its plain twin on a GPU, at shapes that take every way through it."""

import importlib.util
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from kernels import cases
from masks import plain_attention

from hyimg_cli.kernels.attention import fused_attention, packed_attention_of
from hyimg_cli.kernels.captures import waits_are_errors
from hyimg_cli.kernels.choice import ByRows, experts_of
from hyimg_cli.kernels.experts import (
    RoutedTokens,
    plain_experts,
    plain_scaled_experts,
    routed_experts,
    scaled_experts,
)
from hyimg_cli.kernels.ops import PLAIN
from hyimg_cli.kernels.transfer import current
from hyimg_cli.kv.arena import GPU_PAGE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
WIDE = {"width": 1024, "inner": 768, "chosen": 4, "experts": 16}
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


def _needs(capability: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability[0]}.{capability[1]}")


def _case(tokens: int, form: str) -> cases.Call:
    return cases.call(tokens, form=form, dtype=torch.bfloat16, device="cuda", **WIDE)


@pytest.mark.parametrize("form", cases.FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 10])
def test_few_rows(form: str, tokens: int) -> None:
    from hyimg_cli.kernels.decode import decode_experts

    _needs((8, 9) if form == "fp8" else (8, 0))
    case = _case(tokens, form)
    ours = decode_experts(*case.arguments)
    assert cases.relative(ours, plain_experts(*case.arguments)) < 1e-2
    assert torch.equal(ours, decode_experts(*case.arguments))


@pytest.mark.parametrize("tokens", [11, 300, 4000])
def test_many_rows(tokens: int) -> None:
    from hyimg_cli.kernels.fused_ops import FusedOps

    case = _case(tokens, "dense")
    expected = plain_experts(*case.arguments)
    for around in (PLAIN, FusedOps()):
        assert cases.relative(routed_experts(*case.arguments, around), expected) < 1e-2


@pytest.mark.parametrize("tokens", [11, 300, 4000])
def test_many_rows_in_fp8(tokens: int) -> None:
    from hyimg_cli.kernels.fused_ops import FusedOps

    _needs((9, 0))
    case = _case(tokens, "fp8")
    x, weight = case.x_TM.float(), case.weight_TK.float()
    # In float32: rounded to bfloat16 as well, the twin is further off than what it measures. Rows
    # that were not rounded to e4m3 are 0.045 apart, those that were 0.016.
    expected = plain_scaled_experts(RoutedTokens(x, weight, case.index_TK), case.stacks)
    for around in (PLAIN, FusedOps()):
        found = scaled_experts(*case.arguments, around)
        assert cases.relative(found, expected) < 3e-2


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
def test_many_rows_in_nf4() -> None:
    case = _case(300, "nf4")
    expected = plain_experts(*case.arguments)
    assert cases.relative(routed_experts(*case.arguments), expected) < 1e-2


def test_the_parts_around_the_products() -> None:
    from hyimg_cli.kernels.fused_ops import FusedOps

    _needs((8, 9))
    for name, apart in cases.around_cases(FusedOps(), PLAIN, "cuda"):
        assert apart() < 2e-2, name


def test_the_choice_is_by_rows_and_never_waits() -> None:
    _needs((9, 0))
    case = _case(300, "dense")
    compute = experts_of(case.stacks)
    assert isinstance(compute, ByRows)
    compute(case.tokens)
    with waits_are_errors():
        compute(case.tokens)
        compute(case.few(2).tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_and_heads_round_as_their_plain_twin_does(dtype: torch.dtype) -> None:
    """A sum's order seldom tips a rounding: by a step, of the weighted number two; in float32 it
    is always seen.
    """
    from kernels.ops_cases import rounding_cases, ulps

    for name, ours, twin in rounding_cases(dtype, "cuda"):
        for one, other in zip(ours, twin, strict=True):
            assert ulps(one, other) <= (8 if dtype == torch.float32 else 2), name
            if dtype != torch.float32:
                assert (one != other).float().mean() < 0.02, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_router(dtype: torch.dtype) -> None:
    from kernels.ops_cases import router_cases

    for name, ours, twin in router_cases(dtype, "cuda"):
        assert cases.relative(ours[0], twin[0]) < 1e-5, name
        assert cases.relative(ours[1], twin[1]) < 1e-2, name
        # A near tie may be decided the other way.
        assert (ours[2] != twin[2]).float().mean() < 0.05, name


def test_a_row_has_its_bits_in_any_company() -> None:
    from kernels.ops_cases import is_apart_from_company

    assert dict(is_apart_from_company(torch.bfloat16, "cuda")) == dict.fromkeys(
        ("norm", "norm, few", "heads", "heads, few", "routed", "routed, few"), True
    )


def test_routes_by_counting_are_those_of_a_stable_sort() -> None:
    from kernels.ops_cases import route_cases

    assert all(dict(route_cases("cuda")).values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no second GPU")
def test_a_layers_kernels_start_on_its_own_device() -> None:
    from kernels.ops_cases import OURS, TWIN

    x = torch.randn(5, 96, device="cuda:1")
    with current(x.device):
        ours = OURS.norm(x, x[0], 1e-5)
    assert cases.relative(ours, TWIN.norm(x, x[0], 1e-5)) < 1e-5


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "slots"), [(1, 700), (300, 300), (300, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_a_row(dtype: torch.dtype, queries: int, slots: int, is_causal: bool) -> None:
    q = torch.randn(queries, 32, 128, dtype=dtype, device="cuda")
    keys, values = torch.randn(2, 8, slots, 128, dtype=dtype, device="cuda")
    expected = plain_attention(q, keys, values, is_causal)
    assert cases.relative(fused_attention(q, keys, values, is_causal), expected) < 1e-2


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_paged", [True, False])
def test_attention_of_many_rows_in_one_call(is_paged: bool, is_causal: bool) -> None:
    """As one call each; and a row's bits are those of a call for it alone."""
    found = packed_attention_of(torch.device("cuda:0"), torch.bfloat16)
    if found is None:
        pytest.skip("this GPU or this torch has no varlen_attn with pages")
    queries, slots = (1, 300, 7), (700, 300, 260)
    q = torch.randn(sum(queries), 32, 128, dtype=torch.bfloat16, device="cuda")
    width = 3 * GPU_PAGE
    keys, values = torch.randn(2, 3 * width, 8, 128, dtype=torch.bfloat16, device="cuda")
    starts = [0, *accumulate(queries)]

    def numbers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def call(rows: Sequence[int]) -> torch.Tensor:
        own = torch.cat([q[starts[row] : starts[row + 1]] for row in rows])
        sides = [keys.view(-1, GPU_PAGE, 8, 128), values.view(-1, GPU_PAGE, 8, 128)]
        pages = numbers([3 * row + page for row in rows for page in range(3)]).view(-1, 3)
        if not is_paged:
            sides, pages = (
                [
                    torch.cat([side[width * row : width * (row + 1)] for row in rows])
                    for side in (keys, values)
                ],
                None,
            )
        return found.varlen(
            own, *sides, numbers([0, *accumulate(queries[row] for row in rows)]),
            numbers([width * number for number in range(len(rows) + 1)]),
            max(2, *(queries[row] for row in rows)), max(slots[row] for row in rows),
            window_size=(-1, 0) if is_causal else (-1, -1), enable_gqa=True,
            seqused_k=numbers([slots[row] for row in rows]), block_table=pages, num_splits=1,
        )  # fmt: skip

    together = call(range(3)).split(queries)
    for row, ours in enumerate(together):
        first = width * row
        sides = (side[first : first + slots[row]].transpose(0, 1) for side in (keys, values))
        expected = plain_attention(q[starts[row] : starts[row + 1]], *sides, is_causal)
        assert cases.relative(ours, expected) < 1e-2
        assert torch.equal(ours, call([row]))
