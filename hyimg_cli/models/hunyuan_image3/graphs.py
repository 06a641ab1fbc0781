"""Decode steps as CUDA graphs: one graph for each number of rows, over memory that never moves.

    fill     ids, lengths and, where the rows are others than before, the addresses of their K/V
    replay   embed ▸ every layer, attention by addresses ▸ hidden rows
    copy     the hidden rows out, before the next replay writes over them

A graph is captured when its number of rows is first wanted. Rows that a step lacks are filled up:
they write to a slot of their own and nobody reads them. What no graph serves, a run of several
tokens, goes the plain way. Written for a GPU and not run on one yet: off unless asked for.
"""

# Legend: R row (a job that writes), M model width, L layer
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.choice import MOST_FEW_ROWS
from hyimg_cli.kernels.decode_attention import DecodeAttention, Rows, decode_attention
from hyimg_cli.kernels.transfer import to_device
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.hunyuan_image3.attention import StepRows
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM

Run = tuple[Sequence[int] | Tensor, Buffer]
Replay = Callable[[], Tensor]
# Up to here a row more reads its experts anew, so every number has a graph of its own; above, all
# experts are read for any number of rows.
BUCKETS = (*range(1, MOST_FEW_ROWS + 1), 12, 16, 24, 32, 48, 64)


def bucket_of(rows: int) -> int | None:
    """The rows of the smallest graph that takes so many; None where there is none."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


class DecodeStep:
    """One decode step of `count` rows over tensors at fixed addresses: what a graph captures."""

    def __init__(
        self, network: HunyuanImage3ForCausalMM, count: int, spare: Buffer, attend: DecodeAttention
    ) -> None:
        """`spare`: where rows without a job write."""
        self.count = count
        self._network, self._spare, self._attend = network, spare, attend
        device = network.layer_devices[0]
        layers = len(network.layer_devices)
        self._ids_R = torch.zeros(count, dtype=torch.int64, device=device)
        self._length_R = torch.zeros(count, dtype=torch.int64, device=device)
        # Keys' addresses of every layer, values' addresses, and last the slots of a head.
        self._table = torch.zeros(2 * layers + 1, count, dtype=torch.int64, device=device)
        self._rope = network.angles.text_table(network.arch.max_position_embeddings, device)
        # Held while a step is at work alone: a job's buffer is let go with the job.
        self._buffers: list[Buffer] = []
        self._pointed_to: list[ref[Buffer]] = []

    @contextmanager
    def filled(self, runs: Sequence[Run]) -> Iterator[None]:
        """Inside, the step is that of the next token of each buffer; nothing waits for the
        device.
        """
        buffers = [buffer for _, buffer in runs]
        self._buffers = buffers + [self._spare] * (self.count - len(runs))
        self._fill(runs)
        yield
        self._buffers = []

    def _fill(self, runs: Sequence[Run]) -> None:
        device = self._ids_R.device
        self._point()
        known = [ids for ids, _ in runs if not isinstance(ids, Tensor)]
        if len(known) == len(runs):
            self._ids_R[: len(runs)] = to_device(list(chain(*known)), device)
        else:
            parts = [ids if isinstance(ids, Tensor) else to_device(ids, device) for ids, _ in runs]
            torch.cat(parts, out=self._ids_R[: len(runs)])
        lengths = [buffer.length for buffer in self._buffers]
        self._length_R.copy_(to_device(lengths, device), non_blocking=True)

    def compute(self) -> Tensor:
        """The hidden rows [count, M] of what was filled in; new keys and values are written."""
        network = self._network
        x_RM = network.model.wte(self._ids_R)
        rope = self._rope.at(self._length_R)
        hidden_RM: Tensor = network.model.decode(x_RM, rope, StepRows(self._rows, self._attend))
        return hidden_RM

    def _rows(self, layer: int) -> Rows:
        layers = (self._table.shape[0] - 1) // 2
        return Rows(
            [buffer.keys_HSD[layer] for buffer in self._buffers],
            [buffer.values_HSD[layer] for buffer in self._buffers],
            self._table[layer],
            self._table[layers + layer],
            self._table[2 * layers],
            self._length_R,
        )

    def _point(self) -> None:
        """Rows without a job share the spare buffer's one slot: what it holds is of no account."""
        buffers = self._buffers
        before = [pointed() for pointed in self._pointed_to]
        if len(before) == len(buffers) and all(map(_is_same, before, buffers)):
            return
        sides = [b.keys_HSD for b in buffers], [b.values_HSD for b in buffers]
        layers = range(len(self._spare.keys_HSD))
        addresses = [[row[layer].data_ptr() for row in side] for side in sides for layer in layers]
        flat = [*chain(*addresses), *(buffer.capacity for buffer in buffers)]
        self._table.copy_(to_device(flat, self._table.device).view_as(self._table))
        self._pointed_to = [ref(buffer) for buffer in buffers]


class DecodeGraphs:
    """`feed` by graphs: the same call as `HunyuanImage3ForCausalMM.feed`, the same rows."""

    def __init__(
        self,
        network: HunyuanImage3ForCausalMM,
        attend: DecodeAttention,
        capture: Callable[[Callable[[], Tensor]], Replay],
    ) -> None:
        """`capture` turns a step's computation into its replay; see `captured`."""
        self._network, self._attend, self._capture = network, attend, capture
        self._spare = network.new_buffer(1)
        for rows in (*self._spare.keys_HSD, *self._spare.values_HSD):
            rows.zero_()
        self._steps: dict[int, tuple[DecodeStep, Replay]] = {}

    @torch.no_grad()
    def __call__(self, runs: Sequence[Run]) -> Tensor:
        """Append one token behind the prefix of each buffer; each one's hidden row, [R, M]."""
        bucket = bucket_of(len(runs))
        if bucket is None or any(len(ids) != 1 for ids, _ in runs):
            return self._network.feed(runs)
        for _, buffer in runs:
            assert buffer.length < buffer.capacity, "a new token has a slot"
        step, replay = self._step(bucket)
        with step.filled(runs):
            hidden_RM = replay()[: len(runs)].clone()
        for _, buffer in runs:
            buffer.commit(buffer.length + 1)
        self._network.model.rows_seen += len(runs)
        return hidden_RM

    def _step(self, count: int) -> tuple[DecodeStep, Replay]:
        if count not in self._steps:
            step = DecodeStep(self._network, count, self._spare, self._attend)
            # Captured with no job in any row: whatever a warm-up writes goes to the spare buffer.
            with step.filled([]):
                self._steps[count] = step, self._capture(step.compute)
        return self._steps[count]


def _is_same(before: Buffer | None, now: Buffer) -> bool:
    return before is now


def refuse_without_gpu(device_map: str | None) -> None:
    """Passes one GPU's name, with Triton installed. Raises MachineError for any other place."""
    if device_map is None or not device_map.startswith("cuda"):
        what, hint = f"not on {device_map or 'the CPU'}", "set device to cuda:0"
    elif importlib.util.find_spec("triton") is None:
        what, hint = "with Triton, which is not installed", "pip install triton"
    else:
        return
    raise MachineError(
        f"decode_graphs works on one GPU, {what}",
        hint=f"leave decode_graphs out, or {hint}",
        code="machine.no-graphs",
    )


def decode_graphs(network: HunyuanImage3ForCausalMM) -> DecodeGraphs:
    """Graphs for a network that is on one GPU."""
    device = network.layer_devices[0]
    assert set(network.layer_devices) == {device}, "a graph is one GPU's"
    pool = torch.cuda.graph_pool_handle()
    attend = decode_attention(device)
    return DecodeGraphs(network, attend, lambda compute: captured(compute, device, pool))


def captured(compute: Callable[[], Tensor], device: torch.device, pool: Any) -> Replay:
    """A replay of `compute`, which has been run once; it returns the same tensor each time.

    Other threads may go on using the GPU meanwhile.
    """
    with torch.cuda.device(device), torch.no_grad():
        # Once for real on another stream: kernels are compiled and workspaces made outside a graph.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = compute()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
