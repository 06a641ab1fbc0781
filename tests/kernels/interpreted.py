"""Run by `test_triton.py` with TRITON_INTERPRET=1: the Triton kernels on the CPU, as JSON."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels import cases

from hyimg_cli.kernels.decode import decode_experts
from hyimg_cli.kernels.experts import plain_experts
from hyimg_cli.kernels.fused import Fused
from hyimg_cli.kernels.routed import Plain, routed_experts


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for form in cases.FORMATS:
        # Widths that fill no block, and one that fills several.
        for tokens, width, inner in ((1, 96, 32), (3, 320, 48)):
            case = cases.call(tokens, form=form, width=width, inner=inner, experts=4)
            twin = plain_experts(*case.arguments)
            name = f"decode {form} {tokens}x{width}x{inner}"
            found[name] = cases.relative(decode_experts(*case.arguments), twin)
    case = cases.call(3, dtype=torch.bfloat16)
    found["decode bfloat16"] = cases.relative(
        decode_experts(*case.arguments), plain_experts(*case.arguments)
    )
    case = cases.call(33)
    found["routed"] = cases.relative(
        routed_experts(*case.arguments, Fused()), plain_experts(*case.arguments)
    )
    for name, apart in cases.around_cases(Fused(), Plain(), "cpu"):
        found[name] = apart()
    sys.stdout.write(json.dumps(found))


main()
