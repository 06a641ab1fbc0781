"""One layer's parts at the released shapes, with every kernel that may serve: experts, attention of
one row, and what is done row by row around products.

For each number of rows and each format of the weights: milliseconds of each kernel, and what that
is in TFLOP/s and GB/s. The first two rows are the floor in the same run: a large product, a large
copy. Few rows show where reading the chosen experts anew for each row turns into reading all of
them once. Routing is by random scores, nearly even; in a skewed row a quarter of the experts gets
most tokens. Random weights: nothing is said about pictures.

    python benchmarks/expert_kernels.py --out benchmarks/results/expert-kernels-h200.json
    python benchmarks/expert_kernels.py --table hyimg_cli/kernels/experts.json
    python benchmarks/expert_kernels.py --small      the same ways through, on any machine

At the end it says which kernel wins where, and which of ours can go; `--table` writes that down for
this card, which is then what runs on it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyimg_cli.journal.provenance import hardware, versions
from hyimg_cli.kernels.attention import fused_attention, masked_attention
from hyimg_cli.kernels.choice import Experts, form_of, kernel
from hyimg_cli.kernels.expert_table import KERNELS, MEASURED, OURS, ExpertRow, runs
from hyimg_cli.kernels.experts import plain_experts
from hyimg_cli.kernels.formats import Stack, empty_stack
from hyimg_cli.kernels.routed import routed_experts
from hyimg_cli.kernels.rowwise import PLAIN, Rowwise, rowwise
from hyimg_cli.settings.run import Quantization

# By its place, where it is not run as a script.
sys.path.insert(0, str(Path(__file__).parent))
from block_scaled import NAME as DEEP_GEMM
from block_scaled import block_experts, block_stack, deep_product, plain_product

FORMATS = ("dense", "fp8", "nf4")
QUANTIZATION = {"dense": "none", "fp8": "fp8", "nf4": "nf4"}
# A kernel of ours stays where it is quicker by more; other numbers than the twin's by less.
LEAD, WORST = 1.05, 0.1


@dataclass(frozen=True)
class Shape:
    """One layer, and the rows that it is given: AR decode, a denoise step with CFG, a prefill."""

    experts: int = 64
    chosen: int = 8
    width: int = 4096
    inner: int = 3072
    few: tuple[int, ...] = (1, 2, 4, 8, 10, 12, 16, 32, 64)
    many: tuple[int, ...] = (6793, 7906)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    live: int = 3953
    prefix: int = 6793


SMALL = Shape(8, 2, 128, 64, (1, 3), (40,), 4, 2, 16, 30, 50)


@dataclass(frozen=True)
class Row:
    """One measurement: median and range of `runs` milliseconds, each the mean of a burst."""

    what: str
    format: str
    rows: int
    kernel: str
    milliseconds: float
    least: float
    most: float
    runs: int
    tflops: float
    gigabytes_per_s: float


def main() -> None:
    """Measure, print a line for each row, and write everything as JSON."""
    arguments = _arguments()
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or arguments.small):
        raise SystemExit(
            "no GPU: --small runs the same ways through on a CPU, and measures nothing"
        )
    device = torch.device("cuda" if has_gpu else "cpu")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    shape = SMALL if arguments.small else Shape()
    torch.manual_seed(0)
    facts, rows, whole = _facts(shape), [], []
    experts = [partial(_experts, form) for form in FORMATS]
    with torch.no_grad():
        for part in (_floors, *experts, _attention, _rowwise):
            before = len(rows)
            try:
                for row in part(shape, device, dtype):
                    rows.append(row)
                    _show(row)
                    _write(facts, rows, arguments.out)
            except Exception as error:  # of any kind: what was measured stays, the rest goes on
                print(f"{_named(part)}: the rest is left out, {_said(error)}")
                continue
            whole += rows[before:]
    _decide(whole, arguments.table)


def _floors(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    side = 8192 if shape.width > 1000 else 256
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    yield _row("floor", "dense", side, "product", lambda: a @ b, flops=2 * side**3)
    large = torch.empty(side * side * 16, device=device, dtype=torch.uint8)
    target = torch.empty_like(large)
    moved = 2 * large.nbytes
    yield _row("floor", "dense", side, "copy", lambda: target.copy_(large), moved=moved)


def _experts(form: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    stacks = _stacks(shape, form, device, dtype)
    kernels = _kernels(shape, stacks, device, dtype)
    for count in (*shape.few, *shape.many):
        for routing in ("even", "skewed"):
            call = _call(shape, count, routing, device, dtype)
            for name, compute in kernels.items():
                # One row after another reads far more than it needs: not a way for thousands.
                if name == "decode" and count > max(shape.few):
                    continue
                flops = count * shape.chosen * 6 * shape.width * shape.inner
                moved = _read(stacks, call[2], each=name == "decode")
                yield _row(
                    f"experts, {routing}",
                    form,
                    count,
                    name,
                    lambda compute=compute, call=call: compute(*call),  # type: ignore[misc]
                    flops=flops,
                    moved=moved,
                )


def _kernels(
    shape: Shape, stacks: tuple[Stack, Stack], device: torch.device, dtype: torch.dtype
) -> dict[str, Experts]:
    """Every kernel of the table that runs here, by name; one that fails, or has other numbers than
    the plain twin, is told and left out.
    """
    form, found = form_of(stacks[0]), {}
    # Few rows leave groups empty, many fill tiles and begin within them.
    calls = [_call(shape, n, "even", device, dtype) for n in (min(shape.few) + 2, min(shape.many))]
    expected = [plain_experts(*call, *stacks).float() for call in calls]
    for name in KERNELS:
        if not _runs(name, device, form):
            continue
        compute = kernel(name, *stacks)
        try:
            away = max(
                float((compute(*call).float() - plain).norm() / plain.norm())
                for call, plain in zip(calls, expected, strict=True)
                if name != "decode" or len(call[0]) <= max(shape.few)
            )
        except Exception as error:  # a library's, of any kind: the others are measured all the same
            print(f"{name}, {form}: left out, {_said(error)}")
            continue
        if away < WORST:
            found[name] = compute
        else:
            print(f"{name}, {form}: left out, its numbers are {away:.3f} away")
    if form == "none":
        dense = [stack for stack in stacks if isinstance(stack, Tensor)]
        padded: Any = partial(routed_experts, gate_and_up=dense[0], down=dense[1], group_rows=16)
        found["grouped, padded"] = padded
    if form == "fp8" and _has_deep_gemm(device):
        # Weights of its own: told apart from its own twin, and in no row of the table.
        blocks = block_stack(stacks[0]), block_stack(stacks[1])
        try:
            ours, twin = (
                block_experts(*calls[1], stacks=blocks, product=product).float()
                for product in (deep_product, plain_product)
            )
        except Exception as error:  # a library's, of any kind
            print(f"{DEEP_GEMM}: left out, {_said(error)}")
            return found
        away = float((ours - twin).norm() / twin.norm())
        print(f"{DEEP_GEMM}: {away:.4f} from its twin; other weights, never taken by itself")
        around = rowwise(device)
        deep: Any = partial(block_experts, stacks=blocks, product=deep_product, around=around)
        found |= {DEEP_GEMM: deep} if away < WORST else {}
    return found


def _has_deep_gemm(device: torch.device) -> bool:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and find_spec(DEEP_GEMM) is not None


def _runs(name: str, device: torch.device, form: Quantization) -> bool:
    """On a CPU torch's product, and ours where Triton interprets it."""
    if device.type == "cuda":
        return runs(name, torch.cuda.get_device_capability(device), form)
    return name == "grouped" or (name == "decode" and os.environ.get("TRITON_INTERPRET") == "1")


def decided(rows: Sequence[Row], form: str) -> tuple[ExpertRow | None, str]:
    """The table's row of a format by its measurements, and why; None where no library's kernel ran:
    what is reckoned stays.

    Above few rows the quickest library's kernel. Up to the row count at which it stops to win the
    quickest of all, where one of ours has to win by more than a twentieth.
    """
    took: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.what == "experts, even" and row.format == form and row.kernel in KERNELS:
            took.setdefault(row.rows, {})[row.kernel] = row.milliseconds
    counts = sorted(took)
    most = took[counts[-1]] if counts else {}
    libraries = {name: ms for name, ms in most.items() if name not in OURS}
    if not libraries:
        return None, "no library's product ran for many rows: nothing is decided"
    many = min(libraries, key=libraries.__getitem__)
    weighed = {n: {k: ms * (LEAD if k in OURS else 1) for k, ms in took[n].items()} for n in took}
    few = min(weighed[counts[0]], key=weighed[counts[0]].__getitem__)
    won = list(takewhile(lambda n: weighed[n].get(few, inf) < weighed[n][many], counts))
    if few == many or not won:
        told = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(took[counts[0]].items()))
        return ExpertRow(many, many, 0), f"{many} for any number of rows ({told} ms at {counts[0]})"
    one = took[counts[0]]
    why = f"{few} up to {won[-1]} rows ({one[few]:.3f} ms at {counts[0]}, {many} {one[many]:.3f})"
    return ExpertRow(few, many, won[-1]), f"{why}, {many} above"


def _decide(rows: Sequence[Row], table: Path | None) -> None:
    """Say which kernel wins where, and which of ours can go; write the card's rows."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = {form: decided(rows, form) for form in FORMATS}
    for form, (_, why) in found.items():
        print(f"{form}: {why}")
    table_rows = {form: row for form, (row, _) in found.items() if row is not None}
    for name in {row.kernel for row in rows}.intersection(OURS):
        if len(table_rows) == len(FORMATS) and not any(
            name in (row.few, row.many) for row in table_rows.values()
        ):
            print(f"{name} can go: a library is as quick within a twentieth, in every format")
    if table is not None:
        cards = json.loads(table.read_text()) if table.is_file() else {}
        cards[card] = {QUANTIZATION[form]: asdict(row) for form, row in table_rows.items()}
        table.write_text(json.dumps(cards, indent=1, sort_keys=True) + "\n")


def _attention(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    slots = shape.prefix + shape.live
    keys, values = torch.randn(2, shape.kv_heads, slots, shape.head_dim, device=device, dtype=dtype)
    for what, queries, is_causal in (("denoise row", shape.live, False), ("decode row", 1, True)):
        q = torch.randn(queries, shape.heads, shape.head_dim, device=device, dtype=dtype)
        flops = 4 * queries * slots * shape.heads * shape.head_dim
        moved = keys.nbytes + values.nbytes
        for name, attend in (("fused", fused_attention), ("masked", masked_attention)):
            yield _row(
                f"attention, {what}",
                "dense",
                queries,
                name,
                lambda attend=attend, q=q, c=is_causal: attend(q, keys, values, c),  # type: ignore[misc]
                flops=flops,
                moved=moved,
            )


def _rowwise(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """What each must move at least is one read and one write of its rows."""
    for count in (min(shape.few), max(shape.few), max(shape.many)):
        for name, kernels in (("chosen", rowwise(device)), ("plain", PLAIN)):
            for what, moved, call in _row_calls(shape, count, kernels, device, dtype):
                yield _row(what, "dense", count, name, call, moved=moved)


def _row_calls(
    shape: Shape,
    count: int,
    kernels: Rowwise,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    made = partial(torch.randn, device=device, dtype=dtype)
    x, more = made(2, count, shape.width)
    weight, head_weight = made(shape.width), made(shape.head_dim)
    yield "norm", 2 * x.nbytes, lambda: kernels.norm(x, weight, 1e-5)
    yield "sum and norm", 4 * x.nbytes, lambda: kernels.added_norm(x, more, weight, 1e-5)
    fused = made(count, shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_dim)
    angle = torch.rand(count, shape.head_dim, device=device)
    angles = angle.cos(), angle.sin()
    yield (
        "heads",
        2 * fused.nbytes,
        lambda: kernels.heads(fused, angles, (head_weight, head_weight), 1e-5),
    )
    rows = made(count, 2 * shape.inner)
    yield "SwiGLU", rows.nbytes * 3 // 2, lambda: kernels.swiglu(rows)
    router = torch.randn(shape.experts, shape.width, device=device)
    moved = x.nbytes + router.nbytes
    yield "router", moved, lambda: kernels.routed(x, router, shape.chosen)
    index = torch.rand(count, shape.experts, device=device).topk(shape.chosen, dim=1)[1]
    yield "routes", 3 * index.nbytes, lambda: kernels.routes(index, shape.experts, 16)


def _stacks(
    shape: Shape, form: str, device: torch.device, dtype: torch.dtype
) -> tuple[Stack, Stack]:
    sizes = (2 * shape.inner, shape.width), (shape.width, shape.inner)
    made: list[Stack] = []
    for rows, width in sizes:
        if form == "dense":
            weight = torch.empty(shape.experts, rows, width, device=device, dtype=dtype)
            made.append(weight.normal_(std=width**-0.5))
            continue
        stack = empty_stack(form, shape.experts, rows, width, device)  # type: ignore[arg-type]
        for expert in range(shape.experts):
            stack.put(expert, torch.randn(rows, width, device=device) * width**-0.5)
        made.append(stack)
    return made[0], made[1]


def _call(
    shape: Shape, count: int, routing: str, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.rand(count, shape.experts, device=device)
    if routing == "skewed":
        scores[:, : shape.experts // 4] += 0.6
    weight, index = scores.topk(shape.chosen, dim=1)
    x = torch.randn(count, shape.width, device=device, dtype=dtype)
    return x, (weight / weight.sum(dim=1, keepdim=True)).to(dtype), index


def _read(stacks: tuple[Stack, Stack], index: Tensor, *, each: bool) -> int:
    """Bytes of weights that a call must read: each choice's, or each chosen expert's once."""
    tensors = [t for s in stacks for t in ((s,) if isinstance(s, Tensor) else s.tensors)]
    one = sum(t.nbytes for t in tensors) // stacks[0].shape[0]
    return one * (index.numel() if each else int(index.unique().numel()))


def _row(
    what: str,
    form: str,
    rows: int,
    kernel: str,
    call: Callable[[], object],
    *,
    flops: int = 0,
    moved: int = 0,
    runs: int = 7,
) -> Row:
    took = [_burst(call) for _ in range(runs + 2)][2:]
    middle = statistics.median(took)
    return Row(
        what, form, rows, kernel,
        round(middle * 1e3, 4), round(min(took) * 1e3, 4), round(max(took) * 1e3, 4), runs,
        round(flops / middle / 1e12, 2), round(moved / middle / 1e9, 1),
    )  # fmt: skip


def _burst(call: Callable[[], object], times: int = 10) -> float:
    """Seconds of one call, from several behind one another."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def _show(row: Row) -> None:
    speed = f"{row.tflops:8.1f} TFLOP/s {row.gigabytes_per_s:8.0f} GB/s"
    name = f"{row.what} {row.format} {row.rows} rows, {row.kernel}"
    print(f"{name:48} {row.milliseconds:9.3f} ms {speed}")


def _named(part: Any) -> str:
    return f"experts, {part.args[0]}" if isinstance(part, partial) else part.__name__[1:]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def _facts(shape: Shape) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "shape": asdict(shape),
        "notes": "random weights; a burst of 10 calls a run; no CUDA graph",
    }


def _write(facts: dict[str, Any], rows: Sequence[Row], out: Path | None) -> None:
    """With every row: a run that is cut off has kept what it measured."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, "rows": list(map(asdict, rows))}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table",
        type=Path,
        help=f"write this card's rows there; hyimg reads hyimg_cli/kernels/{MEASURED.name}",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
