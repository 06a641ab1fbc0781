"""Formats of a layer's expert weights: as stored, in 8 bits, or in 4.

    dense   [E, O, I] in the model's dtype                        2 bytes a weight in bfloat16
    fp8     e4m3 values [E, O, I], a float32 scale a row [E, O]   1 byte
    nf4     two indices a byte, a float32 scale for 64 weights    0.5625 bytes

Each is quantised one expert at a time, so at most one is held as it was stored.
NF4: the sixteen quantiles of Dettmers et al., QLoRA (2023), in the layout of bitsandbytes, whose
kernels can read it.
"""

# Legend: E expert, O output row, I input column, H byte of two weights, B block of 64 weights
from collections.abc import Callable
from functools import cache
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 64
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
Format = Literal["fp8", "nf4"]


class QuantizedStack(nn.Module):
    """Every expert's matrix in fewer bits, or one expert's.

    Its tensors are buffers: they are counted, placed and moved with the network that holds it.
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in zip(self.names, tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    names: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.buffers())

    def transform(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a stack of the same form with other tensors."""
        return type(self)(*map(change, self.tensors))

    def on(self, device: torch.device) -> Self:
        """Return an empty stack like this one on `device`."""
        # With `empty_like`, the meta device would have torch import its compiler.
        return self.transform(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))

    def one(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's matrix [O, I] in `dtype`."""
        return self.transform(lambda t: t[expert]).dense(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices unpacked in `dtype`."""
        raise NotImplementedError


class Fp8Rows(QuantizedStack):
    """Every expert's matrix in e4m3; a row's weights share a scale."""

    names = "values_EOI", "scale_EO"
    values_EOI: Tensor
    scale_EO: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_EOI.shape

    def put(
        self, expert: int, weight_OI: Tensor, columns: Tensor | None = None, first: int = 0
    ) -> None:
        """Quantize a matrix, or its rows from `first` on, or `columns` at full rows' scales."""
        values_OI, scale_O = quantize_rows(weight_OI.to(self.device))
        if columns is not None:
            values_OI = values_OI.view(torch.uint8)[:, columns.to(self.device)].view(FP8)
        rows = slice(first, first + len(scale_O))
        self.values_EOI[expert, rows] = values_OI
        self.scale_EO[expert, rows] = scale_O

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(self.values_EOI, self.scale_EO, dtype)


class Nf4Blocks(QuantizedStack):
    """Every expert's matrix as indices into `LEVELS`: the even weight in a byte's upper half.

    `packed` uint8, `absmax` float32; blocks run on from one row to the next.
    """

    names = "packed_EOH", "absmax_EB"
    packed_EOH: Tensor
    absmax_EB: Tensor

    @property
    def shape(self) -> torch.Size:
        *rows, width_bytes = self.packed_EOH.shape
        return torch.Size((*rows, 2 * width_bytes))

    def put(
        self, expert: int, weight_OI: Tensor, columns: Tensor | None = None, first: int = 0
    ) -> None:
        """Quantize a matrix, or its rows from `first` (a block's start) on; of `columns` only."""
        if columns is not None:
            assert len(columns) % BLOCK == 0, "a rank has whole blocks of a row"
            weight_OI = weight_OI[:, columns]
        before = first * self.shape[2]
        assert before % BLOCK == 0, "a block is quantised as a whole"
        packed, absmax_B = quantize_nf4(weight_OI.to(self.device))
        self.packed_EOH[expert, first : first + len(weight_OI)] = packed.view(len(weight_OI), -1)
        self.absmax_EB[expert, before // BLOCK :][: len(absmax_B)] = absmax_B

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self.device.type == "cuda":
            return by_bitsandbytes(self, dtype)
        flat = dequantize_nf4(self.packed_EOH.flatten(), self.absmax_EB.flatten(), dtype)
        return flat.view(self.shape)


Stack = Tensor | Fp8Rows | Nf4Blocks
# A layer's experts: `gate_and_up`, which holds `up` in its first half, and `down`.
Stacks = tuple[Stack, Stack]


def empty_stack(
    form: Format, experts: int, rows: int, width: int, device: torch.device
) -> Fp8Rows | Nf4Blocks:
    """Return an empty stack of `experts` matrices [rows, width], to be filled by `put`."""
    if form == "fp8":
        values = torch.empty(experts, rows, width, dtype=FP8, device=device)
        return Fp8Rows(values, torch.empty(experts, rows, device=device))
    assert rows * width % BLOCK == width % 2 == 0, f"a matrix has whole blocks of {BLOCK} weights"
    packed = torch.empty(experts, rows, width // 2, dtype=torch.uint8, device=device)
    return Nf4Blocks(packed, torch.empty(experts, rows * width // BLOCK, device=device))


def one(stack: Stack, expert: int, dtype: torch.dtype) -> Tensor:
    """Return one expert's matrix [O, I] in `dtype`."""
    return stack[expert].to(dtype) if isinstance(stack, Tensor) else stack.one(expert, dtype)


def dense(stack: Stack, dtype: torch.dtype) -> Tensor:
    """Return all matrices [E, O, I] in `dtype`; a quantized stack is unpacked."""
    return stack.to(dtype) if isinstance(stack, Tensor) else stack.dense(dtype)


@cache
def levels_on(device: torch.device) -> Tensor:
    """Return the sixteen levels on a device; copied once, or each product would wait for a copy."""
    return torch.tensor(LEVELS, device=device)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [..., I] in e4m3 with a float32 scale each: the largest value becomes 448.

    Error: at most a sixteenth of each value, or 2**-10 of the scale.
    """
    largest = rows.abs().amax(dim=-1).float()
    scale = (largest / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows.float() / scale[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantize_rows` as far as e4m3 allows; in float32, then cast."""
    # Every e4m3 value is exact in `dtype` too: only the product is in float32, and is stored in
    # place.
    return values.to(dtype).mul_(scale[..., None])


def round_to_fp8(rows: Tensor) -> Tensor:
    """Return rows as e4m3 and one scale each represent them, in their own dtype."""
    return dequantize_rows(*quantize_rows(rows), rows.dtype)


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed indices [n / 2] of the nearest levels, and each block's maximum [n / 64].

    The error is at most 0.1520 of a block's largest value: half the widest gap between levels.
    """
    blocks_BW = weight.float().reshape(-1, BLOCK)
    absmax_B = blocks_BW.abs().amax(dim=1)
    share_BW = blocks_BW / absmax_B.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    even, odd = _nearest(share_BW.flatten()).to(torch.uint8).view(-1, 2).unbind(dim=1)
    return (even << 4) | odd, absmax_B


def _nearest(share: Tensor) -> Tensor:
    """Return the index of the level nearest to each value."""
    levels = levels_on(share.device)
    borders = (levels[1:] + levels[:-1]) / 2
    if share.device.type != "cpu":
        return torch.bucketize(share, borders, out_int32=True)
    # As floats, a CPU compares many at a time: six times as fast.
    index, is_above = torch.zeros_like(share), torch.empty_like(share)
    for border in borders:
        index += torch.gt(share, border, out=is_above)
    return index


def dequantize_nf4(packed: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantize_nf4` as far as sixteen levels allow; flat."""
    levels = levels_on(packed.device)
    index = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
    blocks = levels[index.int()].view(-1, BLOCK) * absmax[:, None]
    return blocks.to(dtype).flatten()


def by_bitsandbytes(stack: Nf4Blocks, dtype: torch.dtype) -> Tensor:
    """Unpack all matrices [E, O, I] with bitsandbytes' kernel."""
    # Checked when the model was built; here it is known to be installed.
    from bitsandbytes import functional

    state = functional.QuantState(
        absmax=stack.absmax_EB.flatten(),
        # One block per row: its CPU kernel starts a new block with each row.
        shape=torch.Size((stack.absmax_EB.numel(), BLOCK)),
        code=levels_on(stack.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    result: Tensor = functional.dequantize_4bit(stack.packed_EOH.view(-1, 1), state)
    return result.view(stack.shape)


class QuantizedLinear(nn.Module):
    """A linear layer whose matrix is quantized, and unpacked for each product."""

    def __init__(self, layer: nn.Linear, form: Format, device: torch.device) -> None:
        """Make room for the values of a `layer` without values, to be filled by `held.put`."""
        super().__init__()
        rows, width = layer.weight.shape
        self.held = empty_stack(form, 1, rows, width, device)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dense(self.held, x.dtype)[0], self.bias)


def quantize_linear(network: nn.Module, form: Format, device: torch.device) -> None:
    """Replace all linear layers with empty quantized ones."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, QuantizedLinear(layer, form, device))
