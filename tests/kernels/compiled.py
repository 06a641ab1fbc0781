"""Run by `test_triton.py`: every Triton kernel compiled for GPUs that are not here, and what a
program of each takes, as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hyimg_cli.kernels import decode, fused_moe, fused_ops, paged_decode
from hyimg_cli.kernels.decode_attention import BLOCK as SLOTS
from hyimg_cli.kernels.decode_attention import RUNS
from hyimg_cli.kernels.formats import BLOCK, FP8_MAX
from hyimg_cli.kv.arena import GPU_PAGE

BF16, FP8, F32, I32, I64, U8 = "*bf16", "*fp8e4nv", "*fp32", "*i32", "*i64", "*u8"
REAL = {"CHOSEN": 8, "INNER": 3072, "WIDTH": 4096, "BLOCK": BLOCK}
HELD = ((decode._DENSE, BF16), (decode._FP8, FP8), (decode._NF4, U8))
# Numbers that are multiples of 16 at the released shapes, which Triton is told at a launch.
WHOLE = ("width", "step", "row_step", "head_step")
# As the calls have them; by the first word of a kernel's name.
LAUNCHED: dict[str, dict[str, Any]] = {
    "norm": {"num_warps": 8, "enable_fp_fusion": False},
    "heads": {"num_warps": 2, "enable_fp_fusion": False},
    "norm_rotate": {"num_warps": 4, "enable_fp_fusion": False},
}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main() -> None:
    found = {}
    for capability in map(int, sys.argv[1:]):
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
                    if kind.startswith("*") or key in WHOLE
                },
            )
            target = GPUTarget("cuda", capability, 32)
            options = {"enable_fp_fusion": True, **LAUNCHED.get(name.split()[0], {})}
            built = triton.compile(source, target=target, options=options)
            found[f"{name} {capability}"] = _told(built)
    sys.stdout.write(json.dumps(found))


def _told(built: Any) -> dict[str, Any]:
    """What a program of the kernel takes: registers of a thread, bytes, warps; and how it reads."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [TOOL, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", told))
    # Sixteen bytes a thread, into registers or, while others are multiplied, into shared memory.
    vectors = r"cp\.async\.cg|ld\.global[.\w:]*\.v(4\.b32|2\.b64)"
    return {
        "registers": int(numbers["REG"]),
        "stack": int(numbers["STACK"]),
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
        "vectors": bool(re.search(vectors, built.asm["ptx"])),
    }


def _kernels() -> Any:
    for form, values in HELD:
        scale = BF16 if form == decode._DENSE else F32
        weights = {"values": values, "scale": scale, "levels": scale}
        ends = {"index": I64, **weights, "out": F32}
        constants = {**REAL, "FORM": form, **_tile(decode._HIDDEN[form])}
        yield f"hidden {form}", decode._hidden, {"x": BF16, **ends}, constants
        ends = {"hidden": F32, "index": I64, "weight": BF16, **weights, "onto": BF16, "out": BF16}
        constants = {**REAL, "FORM": form, "HAS_ONTO": True, **_tile(decode._MIXED[form])}
        yield f"mixed {form}", decode._mixed, ends, constants
    rows = {**dict.fromkeys(("up_rows", "gate_rows", "out"), BF16), "step": "i32", "width": "i32"}
    yield "swiglu", fused_moe._swiglu, rows, {"COLUMNS": 1024}
    for is_swiglu in (False, True):
        yield (
            f"quantize {is_swiglu}",
            fused_moe._quantize,
            {"rows": BF16, "values": FP8, "scale": F32, "width": "i32"},
            {"LARGEST": FP8_MAX, "IS_SWIGLU": is_swiglu, "COLUMNS": 4096},
        )
    yield (
        "gather_sum",
        fused_moe._gather_sum,
        {"rows": BF16, "row_of": I64, "weight": BF16, "onto": BF16, "out": BF16, "width": "i32"},
        {"CHOSEN": 8, "HAS_ONTO": True, "COLUMNS": 1024},
    )
    yield from _by_pointer()
    yield from _around_products()
    yield from _routes()


def _tile(rows_and_columns: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("ROWS", "COLUMNS"), rows_and_columns, strict=True))


def _around_products() -> Any:
    for has_more in (False, True):
        yield (
            f"norm {has_more}",
            fused_ops._norm,
            {
                **dict.fromkeys(("x", "more", "weight", "total", "out"), BF16),
                "width": "i32",
                "eps": "fp32",
            },
            {"HAS_MORE": has_more, "COLUMNS": 4096},
        )
    rows = dict.fromkeys(("fused", "query_weight", "key_weight", "q", "k"), BF16)
    yield (
        "heads",
        fused_ops._split_rotate_norm,
        {**rows, "cos": F32, "sin": F32, "eps": "fp32"},
        {"GROUP": 4, "HELD": 8, "WIDTH": 128},
    )
    yield (
        "norm_rotate",
        fused_ops._norm_rotate,
        {**dict.fromkeys(("x", "weight", "out"), BF16), "cos": F32, "sin": F32, "eps": "fp32"},
        {"HEADS": 28, "HELD": 32, "WIDTH": 128},
    )
    best = {"weight": BF16, "index": I64, "count": "i32"}
    sizes = {"EXPERTS": 64, "HELD": 64, "CHOSEN": 8, "SLOTS": 8}
    yield (
        "logits",
        fused_ops._logits,
        {"x": BF16, "weight": F32, "out": F32},
        {"WIDTH": 4096, "COLUMNS": 2048},
    )
    yield "chosen", fused_ops._chosen, {"logits": F32, **best}, {**sizes, "ROWS": 16}
    yield (
        "routed",
        fused_ops._routed,
        {"x": BF16, "router": F32, "logits": F32, **best},
        {**sizes, "WIDTH": 4096, "ROWS": 64, "COLUMNS": 64},
    )


def _routes() -> Any:
    sizes = {"EXPERTS": 64, "HELD": 64, "BLOCK": 128}
    numbers = {"choices": "i32", "blocks": "i32"}
    yield "counted", fused_moe._count, {"index": I64, "count": I32, **numbers}, sizes
    counts = {"count": I32, "total": I32, "blocks": "i32"}
    yield "placed", fused_moe._place, counts, {"BLOCKS": 1024}
    spread = {
        **dict.fromkeys(("index", "token", "row"), I64),
        **dict.fromkeys(("before", "total", "ends"), I32),
        **numbers,
    }
    yield "spread", fused_moe._scatter, spread, {**sizes, "CHOSEN": 8, "BLOCK_SIZE": 16}


def _by_pointer() -> Any:
    tables = dict.fromkeys(("pointers", "pages", "length"), I64) | {"table_step": "i32"}
    sums = dict.fromkeys(("sums", "largest", "weight"), F32)
    own = {"KV_HEADS": 8, "WIDTH": 128, "PAGE": GPU_PAGE}
    yield (
        "put",
        paged_decode._put,
        {"k": BF16, "v": BF16, **tables, "row_step": "i32", "head_step": "i32"},
        own,
    )
    yield (
        "partial",
        paged_decode._partial,
        {"q": BF16, "k": BF16, **tables, **sums, "scale": "fp32"},
        {**own, "GROUP": 4, "HELD": 16, "RUNS": RUNS, "BLOCK": SLOTS},
    )
    sizes = {"HEADS": 32, "RUNS": RUNS, "WIDTH": 128}
    yield "joined", paged_decode._joined, {**sums, "out": BF16}, sizes


main()
