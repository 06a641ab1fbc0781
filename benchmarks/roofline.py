"""What one H200 should take for each row of `real_shape.py`: predicted by counting, not measured.

The product's own modules run at the released shapes on tensors without memory, as if on a GPU:
`shapes/fake.py` is the GPU, Triton kernels are counted instead of started. Each operation takes the
larger of its FLOP and its bytes at rates measured on such a card (float32's is an assumption); a
row is their sum. What starting a kernel costs is not in it: launches are counted beside, as one for
each operation. Real kernels reach 70 to 90 % of such rates, so a prediction is a
bound from below for this code, and what it is good for is where the bytes go.

    python benchmarks/roofline.py                 any machine, no GPU, about a minute
    python benchmarks/roofline.py --only 'AR*' --forms fp8 --ops 30
"""

import argparse
import json
import tempfile
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import torch
from shapes.cases import GOALS
from shapes.counting import Counter, Facts, Op, Rates, counted
from shapes.fake import fake_gpu
from shapes.network import build
from shapes.scale import REAL, SCALES, Scale, Workload, workload
from torch import Tensor

from hyimg_cli.diffusion.schedule import Step
from hyimg_cli.kernels.pointer_decode import pointer_decode
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.hunyuan_image3.attention import QueryBlock, pieces
from hyimg_cli.models.hunyuan_image3.graphs import DecodeStep
from hyimg_cli.models.hunyuan_image3.rope import joined
from hyimg_cli.models.hunyuan_image3.transformer import DecoderLayer
from hyimg_cli.models.protocols import LivePicture
from hyimg_cli.pipelines.image.sampling import Draw, choose

SAID = "predicted by counting, not measured"
CUDA = torch.device("cuda:0")
RATES = Rates()


@dataclass(frozen=True)
class Predicted:
    """One row, all of it predicted by counting: milliseconds, the part of products, launches.

    `by_op`: milliseconds and launches of each operation. `goal`: of a layer, where one was set.
    """

    name: str
    form: str
    milliseconds: float
    products: float
    launches: int
    gigabytes: float
    teraflop: float
    by_op: dict[str, tuple[float, int]]
    goal: float | None = None

    @property
    def rest(self) -> float:
        return self.milliseconds - self.products


def predicted(name: str, form: str, ops: list[Op], goal: float | None = None) -> Predicted:
    """The sum of a row's operations."""
    took: Tally[str] = Tally()
    count: Tally[str] = Tally()
    for op in ops:
        took[op.name] += RATES.milliseconds(op)  # type: ignore[assignment]
        count[op.name] += 1
    return Predicted(
        name,
        form,
        sum(took.values()),
        sum(RATES.milliseconds(op) for op in ops if op.is_product),
        len(ops),
        sum(op.bytes for op in ops) / 1e9,
        sum(op.flops for op in ops) / 1e12,
        {op: (milliseconds, count[op]) for op, milliseconds in took.most_common()},
        goal,
    )


class Rows:
    """A network of two layers without memory, and what is counted on it.

    A layer's row is the second's: it adds what the first gave, as all but the first do.
    """

    def __init__(self, load: Workload, form: str) -> None:
        self._load, self._form = load, form
        self._network = build(load.arch, form, CUDA, torch.bfloat16)

    def all(self) -> Iterator[Predicted]:
        """Of a layer first, then what stands around the layers, once a call."""
        prefill, denoise = self._prefill(), self._denoise()
        counts = {n: f"{n} row{'s' * (n > 1)}" for n in (1, self._load.scale.together)}
        yield self._row("denoise step, 2 rows", denoise)
        for count, rows in counts.items():
            yield self._row(f"AR decode, {rows}, graph", self._decode(count, self._in_layer))
        yield self._row("prefill", prefill)
        yield self._row("first step without reuse", [*prefill, *prefill, *denoise])
        yield self._row("around the layers: denoise step, 2 rows", self._picture())
        for count, rows in counts.items():
            ops = self._decode(count, self._around)
            yield self._row(f"around the layers: AR decode, {rows}, graph", ops)
            yield self._row(f"a token's choice, {rows}", self._choice(count))

    def _row(self, name: str, ops: list[Op]) -> Predicted:
        goals = GOALS.get(name, {}) if self._load.scale is REAL else {}
        return predicted(name, self._form, ops, goals.get(self._form))

    def _in_layer(self, call: Callable[[], object], rows: int, slots: int = 0) -> list[Op]:
        """What the second layer does in a call."""
        layer = self._network.model.layers[1]
        borders: list[int] = []
        with self._counting(rows, slots) as counter, torch.no_grad():
            hooks = [
                layer.register_forward_pre_hook(lambda *_: borders.append(len(counter.ops))),
                layer.register_forward_hook(lambda *_: borders.append(len(counter.ops))),
            ]
            call()
        for hook in hooks:
            hook.remove()
        start, stop = borders
        return counter.ops[start:stop]

    def _around(self, call: Callable[[], object], rows: int, slots: int = 0) -> list[Op]:
        """What a call does outside the layers."""
        passed = mock.patch.object(DecoderLayer, "forward", lambda _layer, *stream: stream[:2])
        with passed, self._counting(rows, slots) as counter, torch.no_grad():
            call()
        return counter.ops

    def _counting(self, rows: int, slots: int) -> AbstractContextManager[Counter]:
        """Even routing: how many experts so many rows choose at least once."""
        arch = self._load.arch
        unread = (1 - arch.moe_topk[0] / arch.num_experts) ** rows
        return counted(Facts(arch.num_experts * (1 - unread), slots))

    def _denoise(self) -> list[Op]:
        branches = [self._network.branch(self._load.layout, self._filled()) for _ in range(2)]
        rope = joined([branch.live_rope for branch in branches])
        query_blocks = [branch.query_block for branch in branches]
        x_TM = self._rows(2 * self._load.live)
        return self._in_layer(lambda: self._network.model(x_TM, rope, query_blocks), len(x_TM))

    def _prefill(self) -> list[Op]:
        layout, stop = self._load.layout, self._load.layout.live_start
        parts = pieces(0, stop, layout.full_spans, (*layout.cuts, stop - 1))
        query_block = QueryBlock(self._network.new_buffer(layout.live_stop), 0, stop, parts)
        rope = self._network._rope(layout, 0, stop)
        x_TM = self._rows(stop)
        return self._in_layer(lambda: self._network.model(x_TM, rope, [query_block]), stop)

    def _decode(self, count: int, counting: Callable[..., list[Op]]) -> list[Op]:
        """The kernels of a CUDA graph, which launches them all at once."""
        step = DecodeStep(self._network, count, self._network.new_buffer(1), pointer_decode)
        slots = count * (self._load.scale.context + 1)
        return counting(step.compute, count, slots)

    def _choice(self, count: int) -> list[Op]:
        hidden_RM = self._rows(count)
        draws = [Draw(0.6, 1024, 0.95, uniform=0.3)] * count
        # Numbers from the host are a copy that nothing waits for.
        given = torch.empty(4 * count, device=CUDA)
        with mock.patch("hyimg_cli.pipelines.image.sampling.to_device", return_value=given):
            return self._around(lambda: choose(self._network.text_logits(hidden_RM), draws), count)

    def _picture(self) -> list[Op]:
        layout = self._load.layout
        branches = [self._network.branch(layout, self._filled()) for _ in range(2)]
        rows, columns = self._load.prompter.card.latent_grid(self._load.scale.size)
        latents = torch.empty(self._load.arch.vae.latent_channels, rows, columns, device=CUDA)
        live = LivePicture(latents, Step(0, 0.5, 0.48, 500.0, 480.0, -0.02), 2.5, branches)
        return self._around(lambda: self._network.velocity([live]), 2 * self._load.live)

    def _filled(self) -> Buffer:
        buffer = self._network.new_buffer(self._load.layout.live_stop)
        buffer.commit(self._load.layout.live_start)
        return buffer

    def _rows(self, count: int) -> Tensor:
        width = self._load.arch.hidden_size
        return torch.empty(count, width, dtype=torch.bfloat16, device=CUDA)


def rows_of(scale: Scale, form: str) -> list[Predicted]:
    """Every row of one format."""
    with tempfile.TemporaryDirectory() as folder:
        load = workload(Path(folder), scale, 2)
    with fake_gpu():
        return list(Rows(load, form).all())


def main() -> None:
    """Print the table; with --out as JSON, too."""
    arguments = _arguments()
    found = []
    print(SAID)
    for form in arguments.forms.split(","):
        for row in rows_of(SCALES[arguments.scale], form):
            if fnmatch(row.name, arguments.only):
                found.append(row)
                _show(row, arguments.ops)
    if arguments.out is not None:
        rows = [asdict(row) | {"said": SAID} for row in found]
        kept = {"said": SAID, "rates": asdict(RATES), "rows": rows}
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


def _show(row: Predicted, ops: int) -> None:
    goal = f", goal {row.goal}" if row.goal else ""
    print(
        f"{row.name:52} {row.form:6} predicted {row.milliseconds:8.4f} ms: products "
        f"{row.products:.4f}, rest {row.rest:.4f}, {row.launches} launches, "
        f"{row.gigabytes:.3f} GB, {row.teraflop:.3f} TFLOP{goal}"
    )
    for name, (milliseconds, count) in list(row.by_op.items())[:ops]:
        print(f"    {milliseconds:9.4f} ms predicted {count:4} x {name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=sorted(SCALES), default=REAL.name)
    parser.add_argument("--forms", default="dense,fp8")
    parser.add_argument("--only", default="*", help="name of rows, with * for any letters")
    parser.add_argument("--ops", type=int, default=8, help="operations shown for each row")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
