"""Bytes, FLOP and launches of a call on tensors that have no memory: nothing runs, all is counted.

    with torch's FakeTensorMode      shapes and dtypes of device cuda, on any machine
    `Counter`, entered inside it     every operation of torch that reads or writes memory
    `stand_ins`, around both         Triton kernels and attention: never started, but told about

What an operation reads and writes is what its tensors hold, each once: views cost nothing, an
expanded dimension is one row, indexed reads and writes are those of the rows. Rules of their own:
attention, grouped products (only chosen experts are read) and kernels that follow tables. One
operation is one launch; sorts, scans and split products take several.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from fake_gpu.standins import stand_ins
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_FREE = {
    "_unsafe_view",
    "detach",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "is_pinned",
    "_pin_memory",
}
# Operand that is looked up row by row, or written so: it costs what comes out or goes in.
_ROWS_OF = {"index": 0, "index_select": 0, "embedding": 0, "gather": 0}
_ROWS_INTO = {"index_copy_": 3, "index_put_": 2, "index_add_": 3}
_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}


@dataclass(frozen=True)
class Rates:
    """TFLOP/s by dtype of the factors, and TB/s. Float32: no tensor cores, 3/4 of the data sheet.

    The others are those of one H200, measured earlier; e4m3 is taken as twice bfloat16.
    """

    bfloat16: float = 760.0
    fp8: float = 1520.0
    float32: float = 50.0
    memory_tb_s: float = 4.18

    def milliseconds(self, op: "Op") -> float:
        """The larger of the two times that an operation needs at least."""
        rate = {torch.float32: self.float32, torch.float8_e4m3fn: self.fp8}.get(
            op.dtype, self.bfloat16
        )
        return 1e3 * max(op.flops / rate, op.bytes / self.memory_tb_s) / 1e12


@dataclass(frozen=True)
class Op:
    """One operation: its name, bytes read and written together, FLOP, and the factors' dtype."""

    name: str
    bytes: float
    flops: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def is_product(self) -> bool:
        return self.flops > 0


@dataclass
class Facts:
    """What no shape tells. `experts`: how many of a layer are read; `slots`: of K/V, all rows'."""

    experts: float = 0.0
    slots: int = 0


@dataclass
class Counter(TorchDispatchMode):
    """Counts while it is entered; `stand_ins` tells it of the rest."""

    facts: Facts = field(default_factory=Facts)
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        # `attended` tells of attention, whatever operation torch chose.
        is_told = name.startswith("_scaled_dot_product")
        if "::" not in name and name not in _FREE and not is_told and not _is_view(func):
            self.ops.append(self._op(func, name, args, kwargs, out))
        return out

    def _op(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Op:
        results, given = _tensors(out), _tensors((args, kwargs))
        if name in _GROUPED:
            rows, weights = given[0], given[1]
            read = held(weights) * min(1.0, self.facts.experts / weights.shape[0])
            rest = sum(map(held, (rows, *given[2:], *results)))
            flops = 2.0 * prod(rows.shape) * weights.shape[-1]
            return Op(name, read + rest, flops, rows.dtype)
        if name in _ROWS_OF:
            looked_up = given[_ROWS_OF[name]]
            rest = [t for t in given if t is not looked_up]
            return Op(name, 2 * sum(map(held, results)) + sum(map(held, rest)))
        if name in _ROWS_INTO:
            source = args[_ROWS_INTO[name]]
            times = 3 if name == "index_add_" else 2
            return Op(name, times * held(source) + sum(held(t) for t in _tensors(args[1:3])))
        # What is only overwritten is not read.
        if name in ("copy_", "zero_", "fill_"):
            return Op(name, sum(map(held, (*results, *_tensors(args[1:])))))
        moved = sum(held(t) for t in _distinct(given)) + sum(map(held, results))
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return Op(name, moved)
        flops = float(count(*args, **kwargs, out_val=out))
        return Op(name, moved, flops, given[-1].dtype)

    def attended(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool
    ) -> None:
        """Attention as one operation of any kernel that reads each tensor once and holds no
        mask.
        """
        assert mask is None or mask.numel() == 0, "no mask is held in memory"
        queries, slots = q.shape[-2], keys.shape[-2]
        unseen = queries * (queries - 1) // 2 if is_causal or mask is not None else 0
        flops = 4.0 * q.shape[1] * q.shape[3] * (queries * slots - unseen)
        moved = 2 * held(q) + held(keys) + held(values)
        self.ops.append(Op("attention", moved, flops, q.dtype))

    def launched(self, name: str, given: dict[str, Any]) -> None:
        """A Triton kernel as one operation that reads or writes its tensors."""
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        own = KERNELS.get(name)
        moved = own(given, self.facts) if own else sum(held(t) for t in _distinct(tensors))
        self.ops.append(Op(f"triton {name}", moved))


@contextmanager
def counted(facts: Facts) -> Iterator[Counter]:
    """A counter for everything inside; torch's FakeTensorMode is on already."""
    counter = Counter(facts)
    with stand_ins(counter.launched, counter.attended), counter:
        yield counter


def held(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor's elements; an expanded dimension is there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride != 0) * tensor.element_size()


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    info = returned[0].alias_info if returned else None
    return info is not None and not info.is_write


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _few(given: dict[str, Any], experts: Facts, *, height: int, width: int) -> float:
    """Weights of the chosen experts, anew for every row, in whatever format they are held."""
    pairs = given["index"].numel()
    stack = given["values"]
    own = pairs * held(stack) / stack.shape[0]
    if given["scale"] is not stack:
        own += pairs * held(given["scale"]) / stack.shape[0]
    return own + pairs * height * 4 + held(given["index"])


def _hidden(given: dict[str, Any], facts: Facts) -> float:
    inner = given["INNER"]
    return _few(given, facts, height=inner, width=given["WIDTH"]) + held(given["x"])


def _mixed(given: dict[str, Any], facts: Facts) -> float:
    inner = given["INNER"]
    own = _few(given, facts, height=inner, width=given["WIDTH"])
    return own + _ends(given)


def _partial(given: dict[str, Any], facts: Facts) -> float:
    ends = sum(held(given[name]) for name in ("q", "sums", "largest", "weight"))
    width = given["KV_HEADS"] * given["WIDTH"] * given["k"].element_size()
    return ends + 2 * facts.slots * width


def _put(given: dict[str, Any], facts: Facts) -> float:
    return 2 * (held(given["k"]) + held(given["v"]))


def _gather_sum(given: dict[str, Any], facts: Facts) -> float:
    """A row for each choice: what lies between groups is never read."""
    rows, choices = given["rows"], given["row_of"].numel()
    own = choices * rows.shape[1] * rows.element_size()
    return own + held(given["row_of"]) + _ends(given)


def _ends(given: dict[str, Any]) -> int:
    """Each choice's weight, what comes out, and what that is added to."""
    onto = held(given["onto"]) if given["HAS_ONTO"] else 0
    return held(given["weight"]) + held(given["out"]) + onto


# Kernels that do not read all of every tensor, or read memory that no argument is.
KERNELS: dict[str, Callable[[dict[str, Any], Facts], float]] = {
    "hidden": _hidden,
    "mixed": _mixed,
    "partial": _partial,
    "put": _put,
    "gather_sum": _gather_sum,
}
