"""Decode steps as CUDA graphs: one graph per number of rows, over memory that never moves.

    fill     ids, lengths and, if they differ from before, the tables of pages
    replay   embed ▸ every layer, attention by pages ▸ hidden rows
    copy     the hidden rows out, before the next replay overwrites them

Missing rows are filled up: they write to a page of their own that is not read. Runs of several
tokens are computed without graphs.

If a capture fails, that step and all later new ones are computed: the same kernels on the same
memory, so the same numbers, launched one by one. A test on a GPU compares replays with computed
steps, to the bit. Steps of more rows than a graph can hold on a GPU (`kernels.choice.rows_unread`)
are computed in this way from the start, with one warning.
"""

# Legend: R row (a job that writes), M model width, L layer
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor

from hyimg_cli.errors import MachineError
from hyimg_cli.kernels.captures import Capture, GpuCapture, Replay
from hyimg_cli.kernels.choice import (
    ANY_ROWS,
    MOST_FEW_ROWS,
    decode_attention,
    has_triton,
    rows_unread,
)
from hyimg_cli.kernels.decode_attention import DecodeAttention, PagedRows
from hyimg_cli.kernels.transfer import to_device
from hyimg_cli.kv.buffer import Buffer
from hyimg_cli.models.hunyuan_image3.model import HunyuanImage3ForCausalMM
from hyimg_cli.models.hunyuan_image3.transformer import DecodeBatch
from hyimg_cli.settings.run import Quantization
from hyimg_cli.spec.compilers import COMPILER_HINT, triton_lacks

logger = logging.getLogger(__name__)
Run = tuple[Sequence[int] | Tensor, Buffer]
# Up to here, each further row reads its experts anew, so every row count has its own graph. Above,
# all experts are read for any number of rows.
BUCKETS = (*range(1, MOST_FEW_ROWS + 1), 12, 16, 24, 32, 48, 64)
# Maximum length of a reason in a result line.
_MOST_REASON = 200


def bucket_of(rows: int) -> int | None:
    """Return the rows of the smallest graph for `rows`; None if none is large enough."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def buckets_up_to(rows: int) -> tuple[int, ...]:
    """Return the graphs of all row counts up to this one; rows join and leave one by one."""
    last = bucket_of(rows) or BUCKETS[-1]
    return tuple(bucket for bucket in BUCKETS if bucket <= last) if rows > 0 else ()


class DecodeStep:
    """One decode step of `count` rows over tensors at fixed addresses: what a graph captures."""

    def __init__(
        self, network: HunyuanImage3ForCausalMM, count: int, spare: Buffer, attend: DecodeAttention
    ) -> None:
        """Allocate the tensors; `spare`: where rows without a job write, a page."""
        self.count = count
        self._network, self._spare, self._attend = network, spare, attend
        device, layers = network.layer_devices[0], len(network.layer_devices)
        self._arena, most = network.arena, network.arch.max_position_embeddings
        self._ids_R = torch.zeros(count, dtype=torch.int64, device=device)
        self._length_R = torch.zeros(count, dtype=torch.int64, device=device)
        # Each layer's pointers, and each row's pages.
        self._pointers_L2 = torch.zeros(layers, 2, dtype=torch.int64, device=device)
        pages = -(-most // self._arena.page)
        self._pages_RP = torch.zeros(count, pages, dtype=torch.int64, device=device)
        self._rope_2TD = network.angles.rows(0, most, (), device)
        # What the tables on the device were made of.
        self._resized = -1
        self._tables: list[list[int]] = []

    @contextmanager
    def filled(self, runs: Sequence[Run]) -> Iterator[None]:
        """Prepare the step for each buffer's next token within the block; nothing waits."""
        device, missing = self._ids_R.device, self.count - len(runs)
        # Rows without a job have the same id, so they all write the same values to the spare
        # buffer's first row; the values are not used.
        buffers = [buffer for _, buffer in runs] + [self._spare] * missing
        self._point([buffer.pages for buffer in buffers])
        ids = [ids for ids, _ in runs] + ([[0] * missing] if missing else [])
        known = [one for one in ids if not isinstance(one, Tensor)]
        if len(known) == len(ids):
            self._ids_R.copy_(to_device([*chain(*known)], device), non_blocking=True)
        else:
            parts = [one if isinstance(one, Tensor) else to_device(one, device) for one in ids]
            torch.cat(parts, out=self._ids_R)
        lengths = [buffer.length for buffer in buffers]
        self._length_R.copy_(to_device(lengths, device), non_blocking=True)
        yield

    def _point(self, tables: list[list[int]]) -> None:
        """Write pointers and tables, unless they are unchanged since the last step."""
        storage, device = self._arena.storage, self._pages_RP.device
        if storage.resized != self._resized:
            sides = chain(*zip(storage.keys_SKD, storage.values_SKD, strict=True))
            pointers = to_device([side.data_ptr() for side in sides], device)
            self._pointers_L2.copy_(pointers.view_as(self._pointers_L2), non_blocking=True)
            self._resized = storage.resized
        if tables != self._tables:
            width = max(map(len, tables))
            padded = [[*table, *[0] * (width - len(table))] for table in tables]
            pages_RP = to_device([*chain(*padded)], device).view(len(tables), width)
            self._pages_RP[:, :width].copy_(pages_RP, non_blocking=True)
            self._pages_RP[:, width:] = 0  # pages of earlier tables may be gone
            self._tables = [[*table] for table in tables]

    def compute(self) -> Tensor:
        """Return the hidden rows [count, M] of the prepared step; writes new keys and values."""
        model = self._network.model
        # Only the device knows the position of a row's token.
        rope_2RD = self._rope_2TD.index_select(1, self._length_R)
        step = DecodeBatch(self._rows, self._attend)
        return model.through_layers(model.wte(self._ids_R), rope_2RD, step)

    def _rows(self, layer: int) -> PagedRows:
        storage, pointers_2 = self._arena.storage, self._pointers_L2[layer]
        sides = storage.keys_SKD[layer], storage.values_SKD[layer]
        return PagedRows(*sides, pointers_2, self._pages_RP, self._length_R, self._arena.page)


class DecodeGraphs:
    """`feed` by graphs: the same call and rows as `HunyuanImage3ForCausalMM.feed`.

    `captured`: row counts with a graph, in order of capture; `failure`: why other graphs failed, or
    empty.
    """

    def __init__(
        self,
        network: HunyuanImage3ForCausalMM,
        attend: DecodeAttention,
        capture: Capture | None,
        *,
        most_rows: int = ANY_ROWS,
    ) -> None:
        """`capture` returns a computation's replay; None: every step is computed.

        Steps of more than `most_rows` rows are always computed.
        """
        self._network, self._attend, self._capture = network, attend, capture
        self._most_rows, self._has_warned = most_rows, False
        self._spare = network.new_buffer()
        self._spare.reserve(1)
        self._steps: dict[int, tuple[DecodeStep, Replay]] = {}
        self.captured: list[int] = []
        self.failure = ""

    @torch.no_grad()
    def __call__(self, runs: Sequence[Run]) -> Tensor:
        """Append one token to the prefix of each buffer; return the hidden rows, [R, M]."""
        bucket = bucket_of(len(runs))
        if bucket is None or any(len(ids) != 1 for ids, _ in runs):
            return self._network.feed(runs)
        for _, buffer in runs:
            buffer.reserve(buffer.length + 1)
        step, replay = self._step(bucket)
        with step.filled(runs):
            hidden_RM = replay()[: len(runs)].clone()
        for _, buffer in runs:
            buffer.commit(buffer.length + 1)
        self._network.model.rows_seen += len(runs)
        return hidden_RM

    @torch.no_grad()
    def prepare(self, rows: int) -> int:
        """Capture the graphs of every row count up to `rows`; return how many were captured now.

        At most one for each of `BUCKETS`, in the time of three steps each. They share one step's
        memory.
        """
        before = len(self.captured)
        for bucket in buckets_up_to(rows):
            self._step(bucket)
        return len(self.captured) - before

    def degraded(self, rows: int) -> str:
        """Return a note for a text decoded with up to `rows` rows; empty if no capture failed."""
        wanted = {bucket for bucket in buckets_up_to(rows) if bucket <= self._most_rows}
        return "" if wanted <= set(self.captured) else self.failure

    def _step(self, count: int) -> tuple[DecodeStep, Replay]:
        if count not in self._steps:
            step = DecodeStep(self._network, count, self._spare, self._attend)
            self._steps[count] = step, self._replay(step)
        return self._steps[count]

    def _replay(self, step: DecodeStep) -> Replay:
        """Return the computation of a step: a graph's replay if possible."""
        if step.count > self._most_rows and not self._has_warned:
            self._has_warned = True
            more = f" of more than {self._most_rows} rows" if self._most_rows else ""
            logger.warning(
                "decode steps%s run without a CUDA graph on this GPU: with these weights torch "
                "reads the sizes of the expert groups on the host; same results, but slower",
                more,
            )
        if step.count > self._most_rows or self._capture is None:
            return step.compute
        try:
            # Without a job in any row, everything goes to the spare buffer.
            with step.filled([]):
                replay = self._capture(step.compute)
        except Exception as error:
            is_short = isinstance(error, torch.OutOfMemoryError)
            first = "out of memory" if is_short else " ".join(str(error).split("\n")[0].split())
            reason = first[:_MOST_REASON] or type(error).__name__
        else:
            self.captured.append(step.count)
            return replay
        # Here the frames of the failed capture are gone. Wait for the work that it started, and
        # free its memory. No other capture is tried.
        self._capture = None
        self.failure = (
            f"no CUDA graph of a decode step of {step.count} row{'s' * (step.count > 1)} "
            f"({reason}): kernels are launched one by one; same results, but slower"
        )
        logger.warning(self.failure)
        device = self._network.layer_devices[0]
        if device.type == "cuda" and torch.cuda.is_initialized():
            # If the GPU itself failed, the graphs are not the cause: the next step reports it.
            with suppress(RuntimeError):
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
        return step.compute


def refuse_without_gpu(device_map: str | None) -> None:
    """Raise MachineError unless the device is one GPU and Triton can be used."""
    what = hint = ""
    if not is_one_gpu(device_map):
        what, hint = f"not on {device_map or 'the CPU'}", "use --device cuda:0"
    elif not has_triton():
        what = f"with Triton's kernels, but {triton_lacks()}"
        hint = COMPILER_HINT if find_spec("triton") else "run pip install triton"
    if what:
        raise MachineError(
            f"decode_graphs works on one GPU, {what}",
            hint=f"remove decode_graphs, or {hint}",
            code="machine.no-graphs",
        )


def is_one_gpu(device_map: str | None) -> bool:
    """Return True if a model is on one GPU: not on the CPU, nor on several GPUs."""
    return device_map is not None and device_map.startswith("cuda")


def decode_graphs(network: HunyuanImage3ForCausalMM, form: Quantization) -> DecodeGraphs:
    """Return graphs for a network on one GPU with experts in `form`."""
    device = network.layer_devices[0]
    assert set(network.layer_devices) == {device}, "a graph is one GPU's"
    capability = torch.cuda.get_device_capability(device)
    most_rows = rows_unread(capability, network.lm_head.weight.dtype, form)
    return DecodeGraphs(network, decode_attention(device), GpuCapture(device), most_rows=most_rows)
