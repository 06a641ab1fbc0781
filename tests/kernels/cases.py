"""Random experts in every format, and a case for each kernel against its plain twin."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.kernels.experts import RoutedTokens
from hyimg_cli.kernels.formats import Fp8Rows, Nf4Blocks, Stack, Stacks, empty_stack

FORMATS = ("dense", "fp8", "nf4")


@dataclass(frozen=True)
class Call:
    """Arguments of an experts' kernel."""

    x_TM: Tensor
    weight_TK: Tensor
    index_TK: Tensor
    gate_and_up: Stack
    down: Stack

    @property
    def tokens(self) -> RoutedTokens:
        return RoutedTokens(self.x_TM, self.weight_TK, self.index_TK)

    @property
    def stacks(self) -> Stacks:
        return self.gate_and_up, self.down

    @property
    def arguments(self) -> tuple[RoutedTokens, Stacks]:
        return self.tokens, self.stacks

    def few(self, tokens: int) -> "Call":
        """The first tokens alone."""
        rows = (t[:tokens] for t in (self.x_TM, self.weight_TK, self.index_TK))
        return Call(*rows, self.gate_and_up, self.down)


def call(
    tokens: int,
    *,
    form: str = "dense",
    experts: int = 8,
    chosen: int = 2,
    width: int = 64,
    inner: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Call:
    """A case with weights of the size that a trained layer has, so that sums stay near one."""
    gate_and_up = torch.randn(experts, 2 * inner, width, device=device) / width**0.5
    down = torch.randn(experts, width, inner, device=device) / inner**0.5
    weight, index = torch.rand(tokens, experts, device=device).topk(chosen, dim=1)
    weight = (weight / weight.sum(dim=1, keepdim=True)).to(dtype)
    x_TM = torch.randn(tokens, width, device=device).to(dtype)
    return Call(x_TM, weight, index, held(gate_and_up, form, dtype), held(down, form, dtype))


def held(weight_EOI: Tensor, form: str, dtype: torch.dtype) -> Stack:
    """The matrices in a format of `FORMATS`."""
    if form == "dense":
        return weight_EOI.to(dtype)
    assert form in ("fp8", "nf4")
    stack: Fp8Rows | Nf4Blocks = empty_stack(form, *weight_EOI.shape, weight_EOI.device)  # type: ignore[arg-type]
    for number, weight_OI in enumerate(weight_EOI):
        stack.put(number, weight_OI)
    return stack


def relative(ours: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what was expected."""
    ours, expected = ours.float(), expected.float()
    return float((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def around_cases(ours: Any, plain: Any, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """What stands around products of experts: a name, how far from the plain twin."""
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(7, 2 * 96, device=device).to(dtype)
        rows[3] = 0
        row_TK = torch.randint(0, 7, (5, 3), device=device)
        weight = torch.rand(5, 3, device=device).to(dtype)
        yield (
            f"swiglu {dtype}",
            lambda rows=rows: relative(
                ours.swiglu(*rows.chunk(2, dim=-1)), plain.swiglu(*rows.chunk(2, dim=-1))
            ),
        )
        heads = torch.randn(7, 3, 16, device=device).to(dtype)
        heads[3] = 0
        angle = torch.randn(7, 8, device=device).repeat(1, 2)
        scale = (1 + 0.1 * torch.randn(16, device=device)).to(dtype)
        given = heads, (angle.cos(), angle.sin()), scale, 1e-6
        # Steps of numbers are no measure: a rotation may leave little of large numbers.
        yield (
            f"norm_rotate {dtype}",
            lambda given=given: relative(ours.norm_rotate(*given), plain.norm_rotate(*given)),
        )
        for onto in (None, torch.randn(5, 2 * 96, device=device).to(dtype)):
            yield (
                f"gather_sum {dtype}{'' if onto is None else ', onto'}",
                lambda rows=rows, row_TK=row_TK, weight=weight, onto=onto: relative(
                    ours.gather_sum(rows, row_TK, weight, onto),
                    plain.gather_sum(rows, row_TK, weight, onto),
                ),
            )
        for is_swiglu in (False, True):
            name = "swiglu_to_fp8" if is_swiglu else "to_fp8"
            of_ours = partial(ours.to_fp8, rows, is_swiglu=is_swiglu)
            of_plain = partial(plain.to_fp8, rows, is_swiglu=is_swiglu)
            yield (
                f"{name} {dtype}",
                lambda ours=of_ours, plain=of_plain: relative(_dense(*ours()), _dense(*plain())),
            )
            yield (
                f"scale of {name} {dtype}",
                lambda ours=of_ours, plain=of_plain: relative(ours()[1], plain()[1]),
            )


def _dense(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale[:, None]
