"""Measure the machine's best speed in the same run, and count what a row needs of it.

A row's floor is the larger of two times: its additions and multiplications at the speed of a plain
product of the experts' shapes, and the bytes that it must read at the speed of a large copy.
"""

from dataclasses import dataclass

import torch
from workload import Scale

from hyimg_cli.models.hunyuan_image3.config import Architecture
from shapes.timing import Pace, timed

_FP8 = torch.float8_e4m3fn
_PACE = Pace(most=30)


@dataclass(frozen=True)
class Floors:
    """TFLOP/s of products at the experts' shapes; `fp8` is None without such a product."""

    tflops: float
    tflops_fp8: float | None
    copy_tb_s: float

    def milliseconds(self, work: "Work", form: str) -> float:
        """Return the minimum time of a layer's work."""
        fast = self.tflops_fp8 if form == "fp8" and self.tflops_fp8 else self.tflops
        computing = work.flops / self.tflops / 1e12 + work.expert_flops / fast / 1e12
        return 1e3 * max(computing, work.bytes / self.copy_tb_s / 1e12)


@dataclass(frozen=True)
class Work:
    """The work of one layer: FLOP outside and inside the routed experts, bytes to read."""

    flops: float
    expert_flops: float
    bytes: float


def floors(arch: Architecture, scale: Scale, device: torch.device, dtype: torch.dtype) -> Floors:
    """Measure the floors."""
    rows, width, inner = scale.floor_rows, arch.hidden_size, arch.moe_intermediate_size
    shapes = ((width, 2 * inner), (inner, width))
    flops = sum(2 * rows * a * b for a, b in shapes)
    pairs = [
        (
            torch.randn(rows, a, device=device, dtype=dtype),
            torch.randn(b, a, device=device, dtype=dtype),
        )
        for a, b in shapes
    ]
    plain = timed(lambda: [x @ w.mT for x, w in pairs], device, seconds=1, pace=_PACE)
    fp8 = None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        small = [(x.to(_FP8), w.to(_FP8)) for x, w in pairs]
        took = timed(
            lambda: [
                # Sums as in the experts' products: exact ones are slower, and not a floor.
                torch._scaled_mm(
                    x, w.mT, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True
                )
                for x, w in small
            ],
            device,
            seconds=1,
            pace=_PACE,
        )
        fp8 = flops / took.median / 1e9
    large = torch.empty(scale.copy_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(large)
    copied = timed(lambda: target.copy_(large), device, seconds=1, pace=_PACE)
    return Floors(flops / plain.median / 1e9, fp8, 2 * large.nbytes / copied.median / 1e9)


def work(
    arch: Architecture,
    form: str,
    *,
    rows: int,
    pairs: int,
    kv_slots: int,
    experts_read: float,
    width_bytes: int,
) -> Work:
    """Return one layer's work for `rows` tokens with `pairs` of query and key.

    `kv_slots`: slots read. `experts_read`: how many experts' weights. `width_bytes`: of a number
    that is not quantized.
    """
    width, inner = arch.hidden_size, arch.moe_intermediate_size
    heads, kv_heads = arch.num_attention_heads, arch.num_key_value_heads
    projections = (2 * heads + 2 * kv_heads) * arch.head_dim * width
    shared = 3 * width * inner
    router = width * arch.num_experts
    per_row = 2 * (projections + shared + router)
    expert = 3 * width * inner
    expert_bytes = expert * (1 if form == "fp8" else width_bytes)
    return Work(
        flops=rows * per_row + 4 * pairs * heads * arch.head_dim,
        expert_flops=rows * arch.moe_topk * 2 * expert,
        bytes=(projections + shared) * width_bytes
        + 4 * router
        + experts_read * expert_bytes
        + kv_slots * 2 * kv_heads * arch.head_dim * width_bytes,
    )
