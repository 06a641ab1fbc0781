"""Run by `test_triton.py` with TRITON_INTERPRET=1: the Triton kernels on the CPU, as JSON."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels import cases, decode_cases, ops_cases
from kv_rows import unshare

from hyimg_cli.kernels import paged_decode as pointer
from hyimg_cli.kernels.decode import decode_experts
from hyimg_cli.kernels.decode_attention import PagedRows, plain_decode
from hyimg_cli.kernels.experts import plain_experts, routed_experts
from hyimg_cli.kernels.fused_ops import FusedOps
from hyimg_cli.kernels.ops import PLAIN
from hyimg_cli.kernels.paged_decode import paged_decode
from hyimg_cli.models import registry
from hyimg_cli.models.common.layers import FusedPart
from hyimg_cli.models.hunyuan_image3.graphs import DecodeGraphs
from hyimg_cli.settings.run import ModelChoice


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for form in cases.FORMATS:
        # Widths that fill no block, and one that fills several.
        for tokens, width, inner in ((2, 96, 32), (1, 272, 48)):
            case = cases.call(tokens, form=form, width=width, inner=inner, experts=4)
            twin = plain_experts(*case.arguments)
            name = f"decode {form} {tokens}x{width}x{inner}"
            found[name] = cases.relative(decode_experts(*case.arguments), twin)
    onto = torch.randn_like(case.x_TM)
    found["onto"] = cases.relative(
        decode_experts(replace(case.tokens, onto_TM=onto), case.stacks), onto + twin
    )
    case = cases.call(3, dtype=torch.bfloat16)
    found["decode bfloat16"] = cases.relative(
        decode_experts(*case.arguments), plain_experts(*case.arguments)
    )
    case = cases.call(33)
    found["routed"] = cases.relative(
        routed_experts(*case.arguments, FusedOps()), plain_experts(*case.arguments)
    )
    # Every token to the same two experts, the last of them: the others have no rows.
    case.index_TK[:] = torch.tensor([7, 2])
    twin = plain_experts(*case.arguments)
    found["routed alike"] = cases.relative(routed_experts(*case.arguments, FusedOps()), twin)
    few = case.few(5)
    found["decode alike"] = cases.relative(decode_experts(*few.arguments), twin[:5])
    for name, apart in cases.around_cases(FusedOps(), PLAIN, "cpu"):
        found[name] = apart()
    found |= _by_pages_in_all_runs()
    # A run costs a program, which is slow here, also where it is empty: few runs, and long ones.
    with patch.object(pointer, "RUNS", 4):
        found |= dict(_by_pages())
        found["network by pages"] = _network_by_pages()
    found |= _ops()
    found["network of fused rows"] = _network_of_fused_rows()
    sys.stdout.write(json.dumps(found))


def _ops() -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype in (torch.float16, torch.float32):
        for name, ours, twin in ops_cases.rounding_cases(dtype, "cpu"):
            apart = [ops_cases.ulps(a, b) for a, b in zip(ours, twin, strict=True)]
            found[f"ulps {dtype} {name}"] = max(apart)
            unequal = [float((a != b).float().mean()) for a, b in zip(ours, twin, strict=True)]
            found[f"unequal {dtype} {name}"] = max(unequal)
    for dtype in (torch.float16, torch.float32):
        for name, ours, twin in ops_cases.router_cases(dtype, "cpu"):
            pairs = list(zip(ours, twin, strict=True))
            found[f"logits {dtype} {name}"] = cases.relative(*pairs[0])
            found[f"weights {dtype} {name}"] = cases.relative(*pairs[1])
            found[f"choices {dtype} {name}"] = float((pairs[2][0] != pairs[2][1]).sum())
    for name, is_apart in ops_cases.is_apart_from_company(torch.float16, "cpu"):
        found[f"company {name}"] = float(not is_apart)
    chosen = ops_cases.chosen_without_numbers("cpu")
    found["outside"] = float(((chosen < 0) | (chosen >= 6)).sum())
    for name, is_same in ops_cases.route_cases("cpu"):
        found[name] = float(not is_same)
    return found


def _network_of_fused_rows() -> float:
    """A prefill of the embedded network with every kernel of a GPU's layers, against the CPU's."""
    model: Any = registry.load(ModelChoice(device="cpu", dtype="float32"))
    hidden = []
    for kernels in (PLAIN, FusedOps()):
        for part in model.network.modules():
            if isinstance(part, FusedPart):
                part.ops = kernels
        with torch.no_grad():
            hidden.append(model.network.feed([(range(5, 25), model.new_buffer())]))
            hidden[-1] = model.network.text_logits(hidden[-1])
    return cases.relative(hidden[1], hidden[0])


def _network_by_pages() -> float:
    """The embedded network's steps by tables on the device alone, as a captured graph has them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: PagedRows) -> Tensor:
        return paged_decode(q, k, v, replace(rows, keys_SKD=k[:0], values_SKD=v[:0]))

    model: Any = registry.load(ModelChoice(device="cpu", dtype="float32"))
    graphs = DecodeGraphs(model.network, attend, lambda compute: compute)
    apart = 0.0
    with torch.no_grad():
        buffers = [model.new_buffer() for n in range(3)]
        model.network.feed([(range(5, 75 - 20 * n), b) for n, b in enumerate(buffers)])
        plain = [model.new_buffer() for buffer in buffers]
        for copy, buffer in zip(plain, buffers, strict=True):
            copy.share_prefix(buffer, buffer.length)
            unshare(copy)
        for ids in ([9, 8, 7], [20, 30, 40]):
            ours = graphs([([i], b) for i, b in zip(ids, buffers, strict=True)])
            twin = model.network.feed([([i], b) for i, b in zip(ids, plain, strict=True)])
            apart = max(apart, cases.relative(ours, twin))
    # And the trial of a graph has run: tables alone told it where its rows are.
    assert graphs.captured == [3]
    return apart


def _by_pages_in_all_runs() -> dict[str, float]:
    """Rows that leave runs empty, and one whose runs have several blocks."""
    step = decode_cases.step((0, 65, 2500), heads=(2, 1), width=16)
    out, expected = paged_decode(*step.arguments), plain_decode(*step.apart().arguments)
    return {"by pages in all runs": cases.relative(out, expected)}


def _by_pages() -> Iterator[tuple[str, float]]:
    """Attention by pages: what it returns, and what it leaves in memory."""
    kinds = {"float32": ((6, 2), 32), "float32 one head each": ((2, 2), 16)}
    for name, (heads, width) in kinds.items():
        step = decode_cases.step((0, 1, 31, 63, 64, 65, 300), heads=heads, width=width)
        twin = step.apart()
        out, expected = paged_decode(*step.arguments), plain_decode(*twin.arguments)
        yield f"by pages {name}", cases.relative(out, expected)
        ours, its = step.rows, twin.rows
        pairs = [(ours.keys_SKD, its.keys_SKD), (ours.values_SKD, its.values_SKD)]
        differ = [not torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in pairs]
        yield f"memory of {name}", float(sum(differ))
        yield f"unwritten of {name}", float(sum(not a.isnan().any() for a, _ in pairs))
    # Triton's interpreter multiplies the bits of bfloat16: half precision stands in for it.
    step = decode_cases.step((0, 64, 300), dtype=torch.float16)
    twin = step.apart()
    yield (
        "by pages float16",
        cases.relative(paged_decode(*step.arguments), plain_decode(*twin.arguments)),
    )
    together = decode_cases.step((65, 300))
    both = paged_decode(*together.arguments)
    one = paged_decode(*together.of_row(1).arguments)
    yield "alone", float(not torch.equal(one[0], both[1]))


main()
