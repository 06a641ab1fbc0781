"""Run by `test_triton.py`: every Triton kernel compiled for GPUs that are not here, as JSON."""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hyimg_cli.kernels import addressed, decode, fused
from hyimg_cli.kernels.decode_attention import BLOCK as SLOTS
from hyimg_cli.kernels.decode_attention import RUNS
from hyimg_cli.kernels.formats import BLOCK, FP8_MAX

BF16, FP8, F32, I64, U8 = "*bf16", "*fp8e4nv", "*fp32", "*i64", "*u8"
REAL = {"CHOSEN": 8, "INNER": 3072, "WIDTH": 4096, "BLOCK": BLOCK, "ROWS": 16, "COLUMNS": 256}
HELD = ((decode._DENSE, BF16), (decode._FP8, FP8), (decode._NF4, U8))


def main() -> None:
    found = {}
    for capability in (80, 89, 90):
        for name, kernel, types, constants in _kernels():
            # 8.0 knows no e4m3; 8.9 differs from 9.0 in that alone.
            if capability < 90 and (FP8 in types.values()) != (capability == 89):
                continue
            source = ASTSource(
                kernel,
                {**types, **dict.fromkeys(constants, "constexpr")},
                {(kernel.arg_names.index(key),): value for key, value in constants.items()},
                # As at run time: torch aligns what it allocates.
                {
                    (kernel.arg_names.index(key),): [["tt.divisibility", 16]]
                    for key, kind in types.items()
                    if kind.startswith("*")
                },
            )
            target = GPUTarget("cuda", capability, 32)
            built = triton.compile(source, target=target, options={"enable_fp_fusion": True})
            # Sixteen bytes a thread, copied while others are multiplied.
            is_vector = ["whole vectors"] if "cp.async.cg" in built.asm["ptx"] else []
            found[f"{name} {capability}"] = sorted(built.asm) + is_vector
    sys.stdout.write(json.dumps(found))


def _kernels() -> Any:
    for form, values in HELD:
        scale = BF16 if form == decode._DENSE else F32
        weights = {"values": values, "scale": scale, "levels": scale}
        ends = {"index": I64, **weights, "out": F32}
        yield f"hidden {form}", decode._hidden, {"x": BF16, **ends}, {**REAL, "FORM": form}
        ends = {"hidden": F32, "index": I64, "weight": BF16, **weights, "out": BF16}
        yield f"mixed {form}", decode._mixed, ends, {**REAL, "FORM": form}
    rows = {"rows": BF16, "out": BF16, "width": "i32"}
    yield "swiglu", fused._swiglu, rows, {"COLUMNS": 1024}
    for is_swiglu in (False, True):
        yield (
            f"quantize {is_swiglu}",
            fused._quantize,
            {"rows": BF16, "values": FP8, "scale": F32, "width": "i32"},
            {"LARGEST": FP8_MAX, "IS_SWIGLU": is_swiglu, "COLUMNS": 4096},
        )
    yield (
        "gather_sum",
        fused._gather_sum,
        {"rows": BF16, "row_of": I64, "weight": BF16, "out": BF16, "width": "i32"},
        {"CHOSEN": 8, "COLUMNS": 1024},
    )
    yield from _addressed()


def _addressed() -> Any:
    tables = dict.fromkeys(("keys_at", "values_at", "slots", "length"), I64)
    yield "put", addressed._put, {"k": BF16, "v": BF16, **tables}, {"KV_HEADS": 8, "WIDTH": 128}
    sums = dict.fromkeys(("sums", "largest", "weight"), F32)
    yield (
        "partial",
        addressed._partial,
        {"q": BF16, "k": BF16, **tables, **sums, "scale": "fp32"},
        {"KV_HEADS": 8, "GROUP": 4, "HELD": 16, "WIDTH": 128, "RUNS": RUNS, "BLOCK": SLOTS},
    )
    sizes = {"HEADS": 32, "RUNS": RUNS, "WIDTH": 128}
    yield "joined", addressed._joined, {**sums, "out": BF16}, sizes


main()
