"""Which kernels a GPU's layers get, by its compute capability; the GPU itself is a fake one."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import bias

from hyimg_cli.kernels import attention, choice, formats
from hyimg_cli.kernels.choice import (
    ANY_ROWS,
    MOST_FEW_QUANTISED,
    MOST_FEW_ROWS,
    ByRows,
    experts_of,
    most_few_rows,
    rows_unread,
)
from hyimg_cli.kernels.experts import Experts
from hyimg_cli.kernels.formats import Format, empty_stack
from hyimg_cli.settings.run import Quantization

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
FAKE = torch.device("cuda:0")


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield
    formats.levels_on.cache_clear()


def _chosen(monkeypatch: pytest.MonkeyPatch, form: Format | None, capability: tuple[int, int]):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")
    if form is None:
        return experts_of(
            (torch.empty(2, 128, 64, device=FAKE), torch.empty(2, 64, 64, device=FAKE))
        )
    return experts_of((empty_stack(form, 2, 128, 64, FAKE), empty_stack(form, 2, 64, 64, FAKE)))


def _names(chosen: Experts) -> tuple[str, ...]:
    parts = (chosen.few, chosen.many) if isinstance(chosen, ByRows) else (chosen,)
    return tuple(part.func.__name__ for part in parts)  # type: ignore[attr-defined]


@needs_triton
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_fp8_rows_are_multiplied_where_torch_can(
    fake: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """torch has the grouped product of FP8 rows for 9.x alone; Triton reads e4m3 from 8.9 on."""
    many = "scaled_experts" if capability == (9, 0) else "routed_experts"
    few = () if capability == (8, 0) else ("decode_experts",)
    assert _names(_chosen(monkeypatch, "fp8", capability)) == (*few, many)


@needs_triton
def test_dense_rows_take_the_same_way_on_every_gpu(
    fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        names = _names(_chosen(monkeypatch, None, capability))
        assert names == ("decode_experts", "routed_experts")


A100, RTX_4090, H200, B200, RTX_5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
BF16, FP32 = torch.bfloat16, torch.float32
FEW, QUANTISED, ANY = MOST_FEW_ROWS, MOST_FEW_QUANTISED, ANY_ROWS


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "none", "fp8", "nf4"),
    [
        (A100, BF16, FEW, 0, QUANTISED),
        (RTX_4090, BF16, FEW, QUANTISED, QUANTISED),
        (H200, BF16, ANY, ANY, ANY),
        (B200, BF16, ANY, ANY, ANY),
        (RTX_5090, BF16, FEW, QUANTISED, QUANTISED),
        (A100, FP32, FEW, 0, QUANTISED),
        (RTX_4090, FP32, FEW, QUANTISED, QUANTISED),
        (H200, FP32, FEW, ANY, QUANTISED),
        (B200, FP32, FEW, QUANTISED, QUANTISED),
        (RTX_5090, FP32, FEW, QUANTISED, QUANTISED),
    ],
)
def test_rows_up_to_which_nothing_is_read_on_the_host(
    capability: tuple[int, int], dtype: torch.dtype, none: int, fp8: int, nf4: int
) -> None:
    """torch's grouped product reads no sizes for bfloat16 on 9.x and 10.x, nor for FP8 on 9.x."""
    forms: tuple[Quantization, ...] = ("none", "fp8", "nf4")
    assert [rows_unread(capability, dtype, form) for form in forms] == [none, fp8, nf4]


@needs_triton
@pytest.mark.parametrize("capability", [A100, RTX_4090, H200, B200, RTX_5090])
@pytest.mark.parametrize("form", [None, "fp8", "nf4"])
def test_rows_that_a_graph_can_hold_are_those_of_the_kernels_that_are_chosen(
    fake: None, monkeypatch: pytest.MonkeyPatch, form: Format | None, capability: tuple[int, int]
) -> None:
    """In float32, where the dense product reads sizes everywhere: by the kernels alone."""
    monkeypatch.setattr(choice, "require_bitsandbytes", lambda: None)
    names = _names(_chosen(monkeypatch, form, capability))
    few = most_few_rows(capability, form or "none") if names[0] == "decode_experts" else 0
    expected = ANY_ROWS if names[-1] == "scaled_experts" else few
    assert rows_unread(capability, FP32, form or "none") == expected


def test_the_levels_of_nf4_are_copied_to_a_gpu_once(fake: None) -> None:
    """A copy from the host would make every product wait for it."""
    assert formats.levels_on(FAKE) is formats.levels_on(FAKE)
    assert formats.levels_on(FAKE).device == FAKE


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "slots"), [(1, 1), (1, 9), (5, 5), (5, 23)])
def test_a_single_query_goes_where_no_plan_is_made_for_its_length(
    monkeypatch: pytest.MonkeyPatch, queries: int, slots: int, is_causal: bool
) -> None:
    """torch's lower-right bias is flash's own; what has none may be cuDNN's, a plan a length."""
    told: list[tuple[int, int]] = []
    real = bias.causal_lower_right
    monkeypatch.setattr(
        bias, "causal_lower_right", lambda *sizes: told.append(sizes) or real(*sizes)
    )
    q, keys, values = torch.randn(queries, 4, 8), *torch.randn(2, 2, slots, 8)
    attention.fused_attention(q, keys, values, is_causal)
    is_behind = queries < slots and (is_causal or queries == 1)
    assert told == ([(queries, slots)] if is_behind else [])


@needs_triton
@pytest.mark.parametrize(
    ("capability", "rows"), [(A100, (10, 0, 64)), (RTX_4090, (10, 64, 64)), (H200, (10, 10, 64))]
)
def test_what_would_be_made_dense_first_is_read_anew_for_more_rows(
    capability: tuple[int, int], rows: tuple[int, ...]
) -> None:
    """And a graph holds as many: nothing of theirs is read on the host."""
    forms: tuple[Quantization, ...] = ("none", "fp8", "nf4")
    assert tuple(most_few_rows(capability, form) for form in forms) == rows
