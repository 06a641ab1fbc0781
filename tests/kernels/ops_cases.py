"""`PlainOps` in Triton against its plain twin, and routes by counting against a sort: by device."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hyimg_cli.kernels import fused_ops
from hyimg_cli.kernels.fused_ops import FusedOps
from hyimg_cli.kernels.ops import PlainOps

EPS = 1e-5
OURS, TWIN = FusedOps(), PlainOps()
Results = tuple[Tensor, ...]


def ulps(ours: Tensor, expected: Tensor) -> float:
    """The largest distance in steps between neighbouring numbers of the dtype; signs are equal."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    whole = torch.int32 if ours.dtype == torch.float32 else torch.int16
    steps = [t.contiguous().view(whole).long() for t in (ours, expected)]
    return float((steps[0] - steps[1]).abs().max())


def rounding_cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Results, Results]]:
    """Everything that must round as the twin does: a name, ours, and the twin's."""
    for tokens, width in ((1, 96), (7, 320)):
        x, more = torch.randn(2, tokens, width, device=device).to(dtype)
        x[-1] = more[-1] = 0
        weight = _weight(width, dtype, device)
        yield (
            f"norm {tokens}x{width}",
            (OURS.norm(x, weight, EPS),),
            (TWIN.norm(x, weight, EPS),),
        )
        yield (
            f"added {tokens}x{width}",
            OURS.added_norm(x, more, weight, EPS),
            TWIN.added_norm(x, more, weight, EPS),
        )
    # kv heads, query heads of each, width of a head
    for kv_heads, group, width in ((2, 3, 16), (1, 4, 32), (3, 1, 8)):
        fused, angles, weights = head_case(5, kv_heads, group, width, dtype, device)
        yield (
            f"heads {kv_heads}x{group}x{width}",
            OURS.split_rotate_norm(fused, angles, weights, EPS),
            TWIN.split_rotate_norm(fused, angles, weights, EPS),
        )


def head_case(
    tokens: int, kv_heads: int, group: int, width: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Fused rows, their tokens' angles, both weights."""
    fused = torch.randn(tokens, kv_heads, group + 2, width, device=device).to(dtype)
    angle = torch.randn(tokens, width // 2, device=device).repeat(1, 2)
    weights = _weight(width, dtype, device), _weight(width, dtype, device)
    return fused, (angle.cos(), angle.sin()), weights


def router_cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Results, Results]]:
    """Few rows and many, experts that fill no block: a name, ours, and the twin's."""
    for tokens, experts, width, best in ((3, 64, 320, 8), (2, 6, 100, 3), (70, 6, 100, 2)):
        x = torch.randn(tokens, width, device=device).to(dtype)
        weight = torch.randn(experts, width, device=device) / width**0.5
        twin = TWIN.routed(x, weight, best)
        yield f"routed {tokens}x{experts}", OURS.routed(x, weight, best), twin


def chosen_without_numbers(device: str) -> Tensor:
    """What rows choose that are no numbers, few and many; int64."""
    x = torch.full((12, 96), torch.nan, device=device, dtype=torch.float16)
    router = torch.randn(6, 96, device=device)
    with _few_rows(10):
        return torch.cat([OURS.routed(rows, router, 2)[2] for rows in (x, x[:1])])


def is_apart_from_company(dtype: torch.dtype, device: str) -> Iterator[tuple[str, bool]]:
    """Whether each row has the same bits among fewer others."""
    x = torch.randn(40, 96, device=device).to(dtype)
    weight = _weight(96, dtype, device)
    router = torch.randn(6, 96, device=device) / 10
    fused, (cos, sin), weights = head_case(40, 2, 3, 16, dtype, device)
    calls = {
        "norm": lambda rows: (OURS.norm(x[rows], weight, EPS),),
        "heads": lambda rows: OURS.split_rotate_norm(
            fused[rows], (cos[rows], sin[rows]), weights, EPS
        ),
        "routed": lambda rows: OURS.routed(x[rows], router, 2),
    }
    for name, call in calls.items():
        # The interpreter's products, numpy's, depend on a row's place in a block; a GPU's do not.
        some = slice(0, 19) if device == "cpu" else slice(21, 40)
        with _few_rows(10):
            whole, part = call(slice(None)), call(some)
        yield name, all(torch.equal(a[some], b) for a, b in zip(whole, part, strict=True))
        whole, part = call(slice(0, 5)), call(slice(2, 3))
        yield f"{name}, few", all(torch.equal(a[2:3], b) for a, b in zip(whole, part, strict=True))


def _few_rows(most: int) -> Any:
    """Inside, more rows than these are the router's many."""
    return patch.object(fused_ops, "FEW_ROWS", most)


def route_cases(device: str) -> Iterator[tuple[str, bool]]:
    """Whether routes are those of the sort: one block of choices and many, experts nobody chose."""
    sizes = ((1, 2, 5, 1), (33, 2, 8, 16), (300, 8, 64, 1), (300, 8, 64, 16), (40, 1, 3, 16))
    # Half the tokens choose alike; of the last sizes all do, one expert alone among them.
    alike = ((300, 8, 64, 16), (300, 1, 64, 1), (1, 8, 64, 16))
    shares = [(*size, size[0] // 2) for size in sizes] + [(*size, size[0]) for size in alike]
    for tokens, chosen, experts, group_rows, same_choice in shares:
        index = torch.rand(tokens, experts, device=device).topk(chosen, dim=1)[1]
        index[:same_choice] = index[0]
        ours = OURS.align_block_size(index, experts, group_rows)
        twin = TWIN.align_block_size(index, experts, group_rows)
        pairs = zip(vars(ours).values(), vars(twin).values(), strict=True)
        same = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        name = f"routes {tokens}x{chosen} of {experts}, by {group_rows}"
        yield f"{name}, {same_choice} alike", same


def _weight(width: int, dtype: torch.dtype, device: str) -> Tensor:
    return (1 + 0.1 * torch.randn(width, device=device)).to(dtype)
